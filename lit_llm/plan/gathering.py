"""What FSDP2 holds of a stage in each part of a micro-batch: whole weights, buffers, and gradients on their way.

As `lit_llm.distributed.fsdp` sets it up, after torch 2.13's `_fsdp_param_group.py`:

- A gather fills a buffer, from which the whole weights are copied. In the forward pass the buffer lives until the next copy,
  behind the last block through the loss. In the backward pass it is freed after the copy.
- The root (norm and head, or a tied embedding) stays whole from its first use to the end of the backward pass, and so do its
  gradients. The embedding is not gathered again for the backward pass.
- Behind the backward pass of a block, its gradients are copied into a buffer, which lives until the next block's.
"""

from __future__ import annotations

from typing import NamedTuple

from lit_llm.plan.layout import Layout
from lit_llm.plan.weights import Weight, gathered_bytes, gathered_groups, is_tied, reduced_bytes, stored_bytes


class Bytes(NamedTuple):
    """What is held, by the stream of a GPU that it is allocated on."""

    own: int
    """On the stream that computes."""
    sent: int = 0
    """On the streams that gather and reduce."""


class GatheredWeights:
    """Bytes that FSDP2 holds of a stage in each part of a micro-batch; without FSDP2 none.

    Parts of the stage are -1 for the embedding, 0 to L - 1 for its blocks, and L for norm, head and loss.

    Attributes:
        blocks: number of blocks of the stage.
        gradients: bytes of the largest block's gradients.
        root_gradients: bytes of the gradients of norm and head.
        sent: bytes of the buffer from which a block's gradients are reduced, in fp32. 0: not behind this micro-batch.
        already: the weights were gathered by an earlier micro-batch, and kept.

    Args:
        layout: None without FSDP2.
        weights: parameters of this pipeline stage.
        sizes: bytes of an element of the weights, and in matrix products.
        already_gathered: an earlier micro-batch of the step has gathered weights, if they are kept.
        last: this micro-batch frees kept weights, and reduces kept gradients.
    """

    def __init__(
        self, layout: Layout | None, weights: tuple[Weight, ...], sizes: tuple[int, int], *, already_gathered: bool, last: bool
    ) -> None:
        keeps_weights, keeps_gradients = (True, False) if layout is None else layout.kept
        self.keeps, self.already = keeps_weights, already_gathered and keeps_weights
        self.prefetch = 0 if layout is None else layout.prefetch
        self.buffered = layout is not None and layout.divisor("parameters") > 1  # one rank needs no buffers
        self.frees, reduces = last or not keeps_weights, last or not keeps_gradients
        weights = () if layout is None else weights
        block, root, embedding, self.blocks = gathered_groups(weights, tied=is_tied(weights))
        inside = tuple(weight for weight in weights if weight.times)
        self.gradients = stored_bytes(block, sizes[0], trainable=True)
        self.root_gradients = stored_bytes(tuple(w for w in root if w.part != "token embedding"), sizes[0], trainable=True)
        self.sent = reduced_bytes(block) if reduces else 0
        self._block, self._inside, self._embedding, self._root = (
            sum(gathered_bytes(part, *sizes)) for part in (block, inside, embedding, root)
        )

    def forward(self, part: int) -> Bytes:
        if self.already:
            return Bytes(self._kept(self.blocks))
        held = self._kept(part) if self.keeps else self._root
        if part < 0:
            return Bytes(held + self._embedding, self._copied(self._embedding or self._root))
        if part == self.blocks:
            return Bytes(held, self._copied(self._block))
        ahead = min(self.prefetch, self.blocks - 1 - part)
        return Bytes(held + self._block, (1 + ahead) * self._copied(self._block))

    def backward(self, part: int) -> Bytes:
        sent = self.sent if part < self.blocks - 1 else 0
        if self.keeps:
            return Bytes(self._kept(part + 1 if self.frees else self.blocks), sent)
        if part < 0:
            return Bytes(self._root, sent)
        if part == self.blocks:
            return Bytes(self._root, self._copied(self._block))
        return Bytes(self._root + self._block, min(self.prefetch, part) * self._copied(self._block) + sent)

    def reduction(self, block: int) -> Bytes:
        """Behind the backward pass of a block, when its gradients are sent and those of the block behind it have arrived."""
        before = self.backward(block)
        return Bytes(
            before.own - (self._block if self.frees else 0), before.sent + (0 if block < self.blocks - 1 else self.sent)
        )

    def _kept(self, blocks: int) -> int:
        """The whole weights of the stage with this many blocks. -1: the root's only."""
        return (
            self._root
            + (self._embedding if blocks >= 0 else 0)
            + min(max(blocks, 0), self.blocks) * self._inside // self.blocks
        )

    def _copied(self, size: int) -> int:
        """The buffer of a gather."""
        return size if self.buffered else 0

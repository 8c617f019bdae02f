"""A micro-batch as segments: the events that a trace records in each, what these add up to, and their replay in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lit_llm.distributed.parallel_layout import Layout
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.pipeline_order import StageShare
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.weights import (
    Weights,
    computed_gradient_bytes,
    gathered_bytes,
    gathered_groups,
    is_tied,
    reduced_bytes,
    stored_bytes,
)

KINDS = ("activations", "loss head", "gradients", "weight copies", "communication buffers")
ACTIVATIONS, LOSS_HEAD, GRADIENTS, WEIGHT_COPIES, BUFFERS, MATMUL, ATTENTION, WRITTEN, KERNELS = range(9)
"""Kinds of events: bytes of `KINDS`, and FLOPs. GRADIENTS are those that a parameter receives. BUFFERS are not traced. WRITTEN
and KERNELS follow from allocations: their bytes and their number."""
TRAFFIC = tuple(
    (group, kind) for group in ("tensor", "context", "expert") for kind in ("all_gather", "all_reduce", "all_to_all")
)
"""Further kinds of events, two for each group of ranks and kind of collective: bytes of the whole tensor, and calls."""
N_COUNTS = 4 + 2 * len(TRAFFIC)

Event = tuple[int, int]
"""(kind, amount). Allocations are positive, releases negative."""
Segment = list[Event]


def extended(first: Sequence[Segment], second: Sequence[Segment], times: float) -> list[Segment] | None:
    """`first` plus `times` the difference to `second`, event by event; None if the two have different events."""
    if [[kind for kind, _ in segment] for segment in first] != [[kind for kind, _ in segment] for segment in second]:
        return None
    return [
        [(kind, round(a + times * (b - a))) for (kind, a), (_, b) in zip(one, two, strict=True)]
        for one, two in zip(first, second, strict=True)
    ]


@dataclass(frozen=True)
class Change:
    """What a segment does: live bytes by kind at its end and at its peak, relative to its begin; sums of the further kinds."""

    end: tuple[int, ...]
    peak: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, segment: Segment, split_gradient: Callable[[int], tuple[int, int]], *, narrow_weights: bool = False) -> Change:
        """What the events add up to.

        Args:
            split_gradient: of a gradient's bytes, those that are left at the end, and those that are freed when it has been
                reduced.
            narrow_weights: no copies of weights are made.
        """
        live, total, most, counts = [0] * len(KINDS), 0, 0, [0] * N_COUNTS
        peak = tuple(live)
        for kind, amount in segment:
            if kind >= len(KINDS):
                counts[kind - len(KINDS)] += amount
                continue
            if narrow_weights and kind == WEIGHT_COPIES:
                continue
            if kind == GRADIENTS:
                amount, passing = split_gradient(amount)
                live[BUFFERS] += passing
                total += passing
            elif amount > 0:
                counts[WRITTEN - len(KINDS)] += amount
                counts[KERNELS - len(KINDS)] += 1
            live[kind] += amount
            total += amount
            if total > most:
                most, peak = total, tuple(live)
        return cls(tuple(live), peak, tuple(counts))


def combined(*terms: tuple[float, Change]) -> Change:
    """The sum of changes, each times a factor."""
    rows = [[factor * number for number in (*c.end, *c.peak, *c.counts)] for factor, c in terms]
    n, sums = len(KINDS), [round(sum(column)) for column in zip(*rows, strict=True)]
    return Change(tuple(sums[:n]), tuple(sums[n : 2 * n]), tuple(sums[2 * n :]))


class Bytes(NamedTuple):
    """What FSDP2 holds beside the traced bytes: on a GPU's stream that computes, and on those that gather and reduce."""

    own: int
    sent: int = 0


class Operation(NamedTuple):
    """Forward or backward of a block, the embedding, the last norm or the loss: its phase, bytes by kind at its peak, FLOPs."""

    phase: str
    live: dict[str, int]
    flops: int


@dataclass
class MicroBatch:
    """Forward and backward of one micro-batch, without weights and optimizer state. `play` adds changes one after the other.

    Earlier gradients are included: those being accumulated, or those of the previous step, which Lightning frees only after
    the forward pass.

    Attributes:
        peaks: live bytes by kind at the peak of each phase: "forward"; "loss head", forward and backward, with the
            backward of the last norm; "backward".
        on_other_streams: part of each peak that a GPU allocates on streams that gather and reduce.
        live: bytes by kind, now.
        counts: FLOPs of matrix products and of attention that kernels execute, as torch's FlopCounterMode counts them; bytes
            that operations allocate, which is the write traffic to memory; kernels that do so; TRAFFIC.
        timeline: of each change.
        notes: what is unknown or assumed, one sentence each.
        is_known: False: a user's module cannot be traced, so there are only gradients.
    """

    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    on_other_streams: dict[str, int] = field(default_factory=dict)
    live: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    counts: list[int] = field(default_factory=lambda: [0] * N_COUNTS)
    timeline: list[Operation] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    is_known: bool = True

    @property
    def flops(self) -> int:
        return sum(self.counts[:2])

    @property
    def written(self) -> int:
        return self.counts[WRITTEN - len(KINDS)]

    def play(self, phase: str, change: Change, held: Bytes) -> None:
        """Beside what FSDP2 has `held`."""
        self.compare(phase, added(self.live, change.peak), held, sum(change.counts[:2]))
        self.live = added(self.live, change.end)
        self.counts = added(self.counts, change.counts)

    def compare(self, phase: str, live: Sequence[int], held: Bytes, flops: int = 0) -> None:
        """Note a moment, and keep it if it is the phase's peak."""
        found = dict(zip(KINDS, live, strict=True))
        found[KINDS[BUFFERS]] += sum(held)
        self.timeline.append(Operation(phase, found, flops))
        if phase not in self.peaks or sum(found.values()) > sum(self.peaks[phase].values()):
            self.peaks[phase], self.on_other_streams[phase] = found, held.sent


def added(one: Sequence[int], other: Sequence[int], sign: int = 1) -> list[int]:
    """Numbers by kind and others, or without them."""
    return [a + sign * b for a, b in zip(one, other, strict=True)]


# -- a step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A micro-batch of one rank: what determines its memory and its work.

    Attributes:
        sequences: of the micro-batch.
        micro_batches: of an optimizer step.
        rank: of the pipeline.
        cuda: use the kernels of a GPU, not of a CPU.
        gradients_exist: gradients of an earlier micro-batch exist, and this one is accumulated into them.
    """

    settings: RunSettings
    sequences: int
    micro_batches: int = 1
    rank: int = 0
    cuda: bool = False
    gradients_exist: bool = False

    def traced(self, sequences: int) -> Step:
        """So many sequences, with only those settings that a trace depends on: runs that differ in others share traces."""
        run, layout = self.settings, self.settings.layout
        local = Layout(
            tensor_parallel=layout.tensor_parallel,
            expert=layout.expert,
            context=layout.context,
            context_attention=layout.context_attention,
        )
        kept = {name: getattr(run, name) for name in ("precision", "compute", "z_loss", "loss_head", "lora", "length")}
        return Step(RunSettings(run.model, Optimizer("SGD"), 1, 1, layout=local, **kept), sequences, cuda=self.cuda)

    @property
    def stages(self) -> tuple[StageShare, ...]:
        """Of the pipeline, that the rank has; the whole model without a pipeline."""
        return self.settings.pipeline_stages(self.rank)

    @property
    def pipeline(self) -> PipelineLayout | None:
        """None: the whole model is on this rank."""
        layout = self.settings.layout.pipeline
        return layout if layout.ranks > 1 else None

    @property
    def offloads(self) -> bool:
        """Whether weights, gradients and optimizer state are in another memory than activations."""
        return self.settings.offloads(cuda=self.cuda)

    def own_part(self, gradients: int) -> int:
        """Bytes of reduced gradients that stay on this device, of so many bytes before their reduction."""
        return 0 if self.offloads else gradients // self.settings.layout.divisor("gradients")

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 holds weights or gradients."""
        return self.settings.layout.fsdp2 or self.settings.experts_apart

    @property
    def keeps_gradients(self) -> bool:
        """Whole gradients of earlier micro-batches wait to be reduced."""
        return self.gradients_exist and self.fsdp and self.settings.layout.kept.gradients

    def gradients(self, weights: Weights) -> tuple[int, int]:
        """Of these weights, from an earlier micro-batch or step: their kind, and their bytes."""
        if self.keeps_gradients:
            return BUFFERS, reduced_bytes(weights)
        return GRADIENTS, self.own_part(stored_bytes(weights, self.settings.weight_bytes, trainable=True))

    @property
    def traced_length(self) -> int:
        """Tokens of a sequence for which the loss is computed here. The model pads them for tensor parallelism itself."""
        return self.settings.sequence_length if self.settings.layout.context == 1 else self.settings.local_length

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.sequences * self.settings.local_length

    @property
    def ids_bytes(self) -> int:
        """Bytes of ids and targets of a micro-batch."""
        return 2 * self.sequences * self.settings.sequence_length * 8

    @property
    def narrow_weights(self) -> bool:
        """FSDP2 gathers linear layers in the compute dtype, so autocast makes no copies of them."""
        wide, narrow = self.settings.sizes
        return self.fsdp and narrow < wide


class GatheredWeights:
    """Bytes that FSDP2 holds of a stage in each part of a micro-batch; without FSDP2 none.

    As `lit_llm.distributed.fsdp` sets it up, after torch 2.13's `_fsdp_param_group.py`:

    - A gather fills a buffer, from which the whole weights are copied. In the forward pass the buffer lives until the next
      copy, behind the last block through the loss. In the backward pass it is freed after the copy.
    - The root (norm and head, or a tied embedding) stays whole from its first use to the end of the backward pass, and so do
      its gradients. The embedding is not gathered again for the backward pass.
    - Behind the backward pass of a block, its gradients are copied into a buffer, which lives until the next block's.

    Parts of the stage are -1 for the embedding, 0 to L - 1 for its blocks, and L for norm, head and loss.

    Attributes:
        blocks: number of blocks of the stage.
        gradients: bytes of the largest block's gradients.
        shared_gradients: the same, of which a rank keeps its share. They differ for experts that fewer ranks share.
        root_gradients: bytes of the gradients of norm and head.
        sent: bytes of the buffer from which a block's gradients are reduced, in fp32. 0: not behind this micro-batch.
        already: the weights were gathered by an earlier micro-batch, and kept.

    Args:
        weights: parameters of the stage.
        last: this micro-batch frees kept weights, and reduces kept gradients.
    """

    def __init__(self, step: Step, weights: Weights, *, already_gathered: bool, last: bool) -> None:
        layout, sizes = step.settings.layout, step.settings.sizes
        self.keeps, keeps_gradients = layout.kept
        self.already, self.prefetch = already_gathered and self.keeps, layout.prefetch
        self.frees, reduces = last or not self.keeps, last or not keeps_gradients
        weights = weights if step.fsdp else ()
        block, root, embedding, self.blocks = gathered_groups(weights, tied=is_tied(weights))
        self.gradients = computed_gradient_bytes(block, sizes[0])
        self.shared_gradients = stored_bytes(block, sizes[0], trainable=True)
        self.root_gradients = stored_bytes(tuple(w for w in root if w.part != "token embedding"), sizes[0], trainable=True)
        self.sent = reduced_bytes(block) if reduces else 0
        self._block, self._embedding, self._root = (sum(gathered_bytes(part, *sizes)) for part in (block, embedding, root))
        self._inside = gathered_bytes(weights, *sizes)[0]
        ranks = layout.divisor("parameters")
        buffered = tuple(w for w in block if (step.settings.holders(ranks) if w.experts else ranks) > 1)  # one rank needs none
        self._block_buffer = sum(gathered_bytes(buffered, *sizes))
        self._first_buffer = (self._embedding or self._root) if ranks > 1 else 0

    def forward(self, part: int) -> Bytes:
        if self.already:
            return Bytes(self._kept(self.blocks))
        held = self._kept(part) if self.keeps else self._root
        if part < 0:
            return Bytes(held + self._embedding, self._first_buffer)
        if part == self.blocks:
            return Bytes(held, self._block_buffer)
        ahead = min(self.prefetch, self.blocks - 1 - part)
        return Bytes(held + self._block, (1 + ahead) * self._block_buffer)

    def backward(self, part: int) -> Bytes:
        sent = self.sent if part < self.blocks - 1 else 0
        if self.keeps:
            return Bytes(self._kept(part + 1 if self.frees else self.blocks), sent)
        if part < 0:
            return Bytes(self._root, sent)
        if part == self.blocks:
            return Bytes(self._root, self._block_buffer)
        return Bytes(self._root + self._block, min(self.prefetch, part) * self._block_buffer + sent)

    def reduction(self, block: int) -> Bytes:
        """Behind the backward pass of a block, when its gradients are sent and those of the block behind it have arrived."""
        own, sent = self.backward(block)
        return Bytes(own - (self._block if self.frees else 0), sent + (0 if block < self.blocks - 1 else self.sent))

    def _kept(self, blocks: int) -> int:
        """The whole weights of the stage with this many blocks. -1: the root's only."""
        held = min(max(blocks, 0), self.blocks) * self._inside // self.blocks
        return self._root + (self._embedding if blocks >= 0 else 0) + held

"""A loss that is a sum over tokens, computed in chunks: logits, loss and gradients of C tokens at a time.

A token is a row of the hidden states h, of the logits h Wᵀ and of the targets. A `RowLoss` defines the loss of a row:
cross-entropy here, distillation in `lit_llm.models.distillation_loss`. Both losses share the buffers, chunks, autocast, sums
and gradients of this file. Letters as in `lit_llm.models.loss`: N rows, d width, V vocabulary rows of the output matrix W
including padding (with `VocabularyShards`: of this rank's shard), C rows of a chunk, R rows of a block of the chunk's softmax.
The sum dtype is fp32, or fp64 if W is fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_llm.core._torch import IGNORED
from lit_llm.core.memory import SOFTMAX_NUMEL


class VocabularyShards(NamedTuple):
    """Record of how ranks split the output matrix: the loss's ``weight`` is V consecutive rows, equally many on every rank.

    Every rank of the group must call the loss with the same ``hidden``, ``targets`` and settings. The caller must sum the
    gradient of ``hidden`` over the group: each rank has only the *partial sum* through its own columns. The gradient of
    ``weight`` is complete for this rank's rows. All tensors are plain tensors, not DTensors.
    """

    group: dist.ProcessGroup
    """The ranks that hold the shards of one output matrix."""
    first_row: int
    """Row of the whole (padded) output matrix that is row 0 of this rank's ``weight``: a multiple of V."""


def checked_rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, shards: VocabularyShards | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check and flatten the arguments of a loss. `lit_llm.models.loss.cross_entropy` describes the arguments and errors.

    Returns hidden (N, d), weight, targets (N,) with 0 in the place of -100, and a mask (N,) of the targets that were not -100.
    """
    check(hidden, weight, targets, vocab_size, shards)
    targets = targets.reshape(-1)
    counted = targets != IGNORED
    # Ignored rows stay in the products, with id 0: dropping them would need their positions on the host.
    targets = torch.where(counted, targets, 0)
    _check_range(targets, vocab_size)
    return hidden.reshape(-1, hidden.shape[-1]), weight, targets, counted


def real_columns(weight: Tensor, vocab_size: int, shards: VocabularyShards | None) -> int:
    """Return how many of this rank's columns of h Wᵀ, the first ones, are not padding: 0 if the shard is all padding."""
    return vocab_size if shards is None else min(max(vocab_size - shards.first_row, 0), weight.shape[0])


def check(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, shards: VocabularyShards | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        # Detects a DTensor without importing its class, which takes 0.7 s.
        assert not hasattr(tensor, "to_local"), f"{name} is a DTensor; the loss takes plain local tensors, and `shards`"
    assert hidden.shape[:-1] == targets.shape, (hidden.shape, targets.shape)
    rows, ranks = weight.shape[0], 1 if shards is None else shards.group.size()
    assert 0 < vocab_size <= rows * ranks, (vocab_size, weight.shape, ranks)
    assert shards is None or shards.first_row in range(0, rows * ranks, rows), (shards, weight.shape, ranks)


def _check_range(targets: Tensor, vocab_size: int) -> None:
    """Raise IndexError (on CUDA, a device-side assert) for a target beyond the vocabulary. Every rank checks all targets."""
    if targets.device.type == "cpu":
        wrong = targets[(targets < 0) | (targets >= vocab_size)]
        if len(wrong):
            raise IndexError(f"Target {wrong[0]} is out of bounds: the vocabulary has {vocab_size} tokens.")
    else:  # gather from an expanded 1-element tensor: a bounds check on the device, without a synchronisation
        targets.new_zeros(1).expand(vocab_size).gather(0, targets)


class RowLoss(Protocol):
    """Protocol of a loss of rows (tokens): computes each row's loss and its gradient with respect to the row of logits h Wᵀ,
    also for rows whose target is ignored."""

    def scratch(self, product: Tensor, rows: int) -> Tensor:
        """Allocate n temporary buffers (n, rows, …) for calls with up to `rows` rows of a `product` (C, V)."""

    def __call__(
        self, product: Tensor, targets: Tensor, rows: slice, scratch: Tensor, *, need_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Return loss and NLL of R rows, (R, 1), in the sum dtype; the same bits on every rank of a split vocabulary.

        Args:
            product: (R, V) rows of h Wᵀ in the compute dtype. With `need_gradient`, the call overwrites these rows by the
                gradient of the loss with respect to them; without, the call may overwrite them by any values.
            targets: (R, 1) int64 in [0, vocab_size), also in ignored rows.
            rows: the slice of the N rows that is computed.
            scratch: (n, R, …), a part of the buffers that the method `scratch` allocated.
        """


def chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, row_loss: RowLoss, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the loss and the sum of the NLL over counted rows, and the NLL of each row (N,), 0 if not counted.

    Only the sum of the loss is differentiable, and only once: its gradients are computed in the forward pass. Gradients that
    are not needed (``no_grad``, frozen weight) are not computed.

    Args:
        hidden, weight, targets, counted: the results of `checked_rows`.
        chunk_size: C, the number of rows of a chunk.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        sums: tuple[Tensor, Tensor, Tensor] = _ChunkedLoss.apply(hidden, weight, targets, counted, row_loss, chunk_size)
        return sums
    return _forward(hidden, weight, targets, counted, row_loss, chunk_size, need_hidden=False, need_weight=False)[:3]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, row_loss: RowLoss, chunk_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        need_hidden, need_weight, *_ = ctx.needs_input_grad
        loss, nll, each, *ctx.gradients = _forward(
            hidden, weight, targets, counted, row_loss, chunk_size, need_hidden=need_hidden, need_weight=need_weight
        )
        ctx.dtypes = _gradient_dtypes(hidden, weight)
        ctx.mark_non_differentiable(nll, each)
        return loss, nll, each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("A chunked loss can be differentiated only once: the first backward frees its gradients.")
        # Scale the gradients in place and release them: the (V, d) gradient exists once and becomes weight.grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        grad_hidden, grad_weight = (
            None if g is None else g.mul_(grad_loss).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return grad_hidden, grad_weight, None, None, None, None


class RowNLL(torch.autograd.Function):
    """Returns the differentiable NLL of each row (N,). Recomputes logits in backward. Arguments as in `chunked_loss`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, row_loss: RowLoss, chunk_size: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets, counted)
        ctx.settings, ctx.dtypes = (row_loss, chunk_size), _gradient_dtypes(hidden, weight)
        device = hidden.device.type  # autocast is off in the backward pass
        ctx.autocast = {"enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device)}
        return _forward(hidden, weight, targets, counted, row_loss, chunk_size, need_hidden=False, need_weight=False)[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, counted = ctx.saved_tensors
        need_hidden, need_weight, *_ = ctx.needs_input_grad
        with torch.autocast(hidden.device.type, **ctx.autocast):
            *_, grad_hidden, grad_weight = _forward(
                hidden, weight, targets, grad * counted, *ctx.settings, need_hidden=need_hidden, need_weight=need_weight
            )
        gradients = zip((grad_hidden, grad_weight), ctx.dtypes, strict=True)
        return *(None if g is None else g.to(dtype) for g, dtype in gradients), None, None, None, None


def _gradient_dtypes(hidden: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of `hidden`'s gradient, dtype of `weight`'s gradient). The latter is the weight's `grad_dtype`, if that is set."""
    return hidden.dtype, (weight.is_leaf and weight.grad_dtype) or weight.dtype


def _forward(
    hidden: Tensor,  # (N, d)
    weight: Tensor,  # (V, d)
    targets: Tensor,  # (N,) int64 in [0, vocab_size), also in ignored rows
    counted: Tensor,  # (N,) bool, or the weight of each row
    row_loss: RowLoss,
    chunk_size: int,
    *,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the sum of the loss, the sum of the NLL, the NLL of each row (N,), and two gradients of the sum of the loss.

    The gradients, of hidden (N, d) in the compute dtype and of weight (V, d) in the sum dtype, are None if not needed. With
    shards the sums are over the whole vocabulary, and the gradients are only through this rank's columns of h Wᵀ.
    """
    device = hidden.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    dtype, sum_dtype = weight.dtype, torch.promote_types(weight.dtype, torch.float32)
    rows, padded_size = hidden.shape[0], weight.shape[0]
    loss, nll = torch.empty(2, rows, 1, dtype=sum_dtype, device=device)
    grad_hidden = torch.empty_like(hidden) if need_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if need_weight else None

    # All chunks share buffers: new memory for each chunk would cost page faults, a third of the time on a CPU. Matrix products
    # are faster with many rows at once. The softmax is not, and needs twice the bytes, so it runs in smaller blocks.
    product_block = torch.empty(min(chunk_size, rows), padded_size, dtype=dtype, device=device)
    softmax_rows = max(1, SOFTMAX_NUMEL // padded_size)
    scratch = row_loss.scratch(product_block, min(softmax_rows, chunk_size, rows))
    term = torch.empty_like(weight) if need_weight and dtype != sum_dtype else None

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for start in range(0, rows, chunk_size):
            chunk = slice(start, min(start + chunk_size, rows))
            h = hidden[chunk]  # (C, d)
            product = torch.mm(h, weight.T, out=product_block[: h.shape[0]])  # (C, V)
            for first in range(chunk.start, chunk.stop, softmax_rows):
                block = slice(first, min(first + softmax_rows, chunk.stop))
                loss[block], nll[block] = row_loss(
                    product[block.start - start : block.stop - start],
                    targets[block, None],
                    block,
                    scratch[:, : block.stop - block.start],
                    need_gradient=need_hidden or need_weight,
                )
            # Ignored rows are zeroed on the (C, d) side of each product, which is smaller than (C, V).
            keep = counted[chunk, None]  # (C, 1)
            if grad_hidden is not None:
                torch.mm(product, weight, out=grad_hidden[chunk]).mul_(keep)
            if grad_weight is not None and term is None:
                grad_weight.addmm_(product.T, (h * keep).to(h.dtype))
            elif grad_weight is not None:
                grad_weight += torch.mm(product.T, (h * keep).to(h.dtype), out=term)

    each = nll[:, 0].mul_(counted)
    return loss[:, 0].mul_(counted).sum(), each.sum(), each, grad_hidden, grad_weight


@dataclass(frozen=True)
class CrossEntropyRows:
    """The `RowLoss` of cross-entropy: computes loss and gradient of some rows (tokens) from their logits.

    See `lit_llm.models.loss.cross_entropy`. `columns`: the result of `real_columns`.
    """

    columns: int
    softcap: float | None = None
    z_loss: float = 0.0
    shards: VocabularyShards | None = None

    def scratch(self, product: Tensor, rows: int) -> Tensor:
        return product.new_empty(2, rows, product.shape[1], dtype=torch.promote_types(product.dtype, torch.float32))

    def __call__(
        self, product: Tensor, targets: Tensor, rows: slice, scratch: Tensor, *, need_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        columns, softcap, z_loss, shards, target = self.columns, self.softcap, self.z_loss, self.shards, targets  # (R, 1)
        z, p = scratch
        if z.dtype == product.dtype:
            z = product
        else:
            z.copy_(product)
        if softcap is not None:
            z.div_(softcap).tanh_().mul_(softcap)
        z[:, columns:] = -torch.inf
        if shards is None:
            torch.log_softmax(z, dim=-1, out=p)
            z_target, log_p_target = z.gather(1, target), p.gather(1, target)  # (R, 1)
            log_z = z_target - log_p_target
            if need_gradient:
                p.exp_()
        else:
            target = target - shards.first_row
            here = (target >= 0) & (target < columns)  # (R, 1) bool
            target = torch.where(here, target, 0)
            z_target, log_p_target, log_z = _sharded_softmax(z, torch.where(here, z.gather(1, target), 0), p, shards)
        if need_gradient:
            # d loss / d z = (1 + 2·z_loss·logsumexp)·softmax(z) − onehot; for the raw product, times 1 − (z/softcap)².
            # expm1 computes the target's entry: softmax minus 1 would cancel if the model is confident.
            grad, grad_target = p, torch.expm1(log_p_target)
            if z_loss:
                grad_target += 2 * z_loss * log_z * log_p_target.exp()
                grad.mul_(1 + 2 * z_loss * log_z)
            if softcap is not None:
                grad_target *= 1 - (z_target / softcap).square()
                grad.addcmul_(grad, z.square_(), value=-1 / softcap**2)
            if shards is not None:
                grad_target = torch.where(here, grad_target, grad.gather(1, target))
            grad.scatter_(1, target, grad_target)
            product.copy_(grad)
            product[:, columns:] = 0
        nll = -log_p_target
        return (nll + z_loss * log_z.square() if z_loss else nll), nll


def _sharded_softmax(
    z: Tensor,  # (R, V) logits of this rank's columns, -inf where padding
    z_target: Tensor,  # (R, 1) the target's logit on the rank with its column, else 0
    p: Tensor,  # (R, V) overwritten by this rank's columns of the softmax over all ranks' columns
    shards: VocabularyShards,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write this rank's columns of the softmax over the whole vocabulary into p. Return each row's logit of the target,
    log-probability of the target, and logsumexp: (R, 1) each, equal on all ranks."""
    # In a shard of padding only, the largest logit is -inf, and -inf − -inf is NaN. The clamp avoids that.
    top = z.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)  # (R, 1)
    torch.sub(z, top, out=p).exp_()
    mine = torch.stack((top, p.sum(dim=-1, keepdim=True), z_target))  # (3, R, 1)
    tops, sums, z_targets = gathered(mine, shards).unbind(1)  # (ranks, R, 1)
    highest = tops.amax(dim=0)
    total = (sums * torch.exp(tops - highest)).sum(dim=0)  # Σ exp(z − highest)
    z_target, log_total = z_targets.sum(dim=0), total.log()
    p.mul_(torch.exp(top - highest) / total)
    # Subtract in this order: highest + log_total would round away the loss of a confident prediction.
    return z_target, z_target - highest - log_total, highest + log_total


def gathered(values: Tensor, shards: VocabularyShards | None) -> Tensor:
    """All-gather `values` (…) from all ranks of the shards' group: (ranks, …). Without shards returns `values` as (1, …)."""
    if shards is None:
        return values[None]
    everyone = values.new_empty(shards.group.size(), *values.shape)
    dist.all_gather(list(everyone.unbind()), values, group=shards.group)
    return everyone

"""Next-token cross-entropy from hidden states: with full logits, or in chunks to save memory.

Both functions take the hidden states and the output matrix instead of logits. They return *sums*; the caller divides by the
token count of the global batch. Both compute the same value and gradient:

    z    = softcap · tanh(h Wᵀ / softcap)            (no softcap: z = h Wᵀ), without columns ≥ vocab_size
    nll  = logsumexp(z) − z[target]                  nats, summed over targets ≠ ignore_index
    loss = nll + z_loss · logsumexp(z)²              (z-loss: PaLM, arXiv 2204.02311, section 5)

Of a model that predicts further tokens ahead, `with_ahead` adds their losses. `token_nll` gives the NLL of each token, for
losses that are no sum over tokens.

Letters: N rows (B·T), d width, V vocabulary rows of W including padding (with `VocabularyShards`: of this rank's shard of
W), C rows of one chunk, R rows of one block of its softmax.

Under tensor parallelism W is sharded by rows: each rank computes its columns of z, and no rank holds a whole row. Each block
of the softmax takes one all-gather of three numbers per row and rank: the greatest logit, the sum of exponentials relative to
it, and the target's logit. Every rank then does the same arithmetic on the same numbers, so the sums are bitwise equal on all
ranks. An all-reduce would not guarantee that.

Why not ``F.linear_cross_entropy`` (torch ≥ 2.13)? It has no softcap, no z-loss, no padded vocabulary and no autocast, and
was slower on two AMX cores, N 8192, V 50304, d 768. Median ratio of time, and peak extra memory, of forward and backward
(benchmarks/chunked_loss.py, shared machine: the ratios scattered by 20 %):

                       fp32              bf16 autocast
    full               1.00   4.99 GB    1.00   5.06 GB
    chunked, C 1024    0.79   0.47 GB    0.73   0.68 GB
    torch's            1.28   0.47 GB    4.68   0.92 GB
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_llm.core.errors import UserError
from lit_llm.core.memory import SOFTMAX_NUMEL
from lit_llm.core.number_domain import STEPS, at_least, range_problems, whole
from lit_llm.models.router import RouterSums

CHUNK_SIZE = 1024
"""Rows of a chunk. Each chunk reads W twice and adds to its gradient; smaller ones save little (512 in bf16: 0.63 GB)."""


@dataclass
class LossConfig:
    """How the loss is computed."""

    chunk_size: Annotated[int | None, whole(1, STEPS)] = None
    """Tokens whose logits are in memory at a time. None: all at once. Chunks save memory if the vocabulary is large."""
    z_loss: Annotated[float, at_least(0, 1000)] = 0.0
    """Weight of logsumexp(logits)^2 in the training loss, which limits the growth of logits (PaLM: 1e-4). Not in metrics."""

    ahead_weight: Annotated[float, at_least(0, 1000)] = 0.3
    """Weight in the training loss of the mean loss of the tokens further ahead (DeepSeek-V3: 0.3, later 0.1), which
    `model.predict_ahead` adds. Not in metrics but `train/loss_ahead`."""

    def problems(self) -> list[str]:
        return range_problems(LossConfig, "loss", vars(self))


class LossSums(NamedTuple):
    """Sums over the counted targets of one micro-batch; 0-d tensors on the device of the hidden states."""

    loss: Tensor
    """Differentiable sum to minimise: NLL plus z-loss; float32 (float64 for float64 inputs)."""
    nll: Tensor
    """Detached sum of the negative log-likelihood alone, in nats, same dtype: what perplexity is made of."""
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    """Detached int64 number of targets ≠ ignore_index."""
    row_nll: Tensor | None = None
    """Only ``by_row``: `nll` of each sequence, shape (B,), same dtype."""
    row_count: Tensor | None = None
    """Only ``by_row``: `count` of each sequence, shape (B,)."""
    router: RouterSums | None = None
    """Of a mixture of experts: detached, (L, …) of L blocks. `loss` includes its loss."""
    means: Tensor | None = None
    """(k, 2): sums for k further means, and what each is divided by. With `predict_ahead` the `nll` and `count` of the tokens
    further ahead, whose losses `loss` includes. Otherwise those that the objective names."""
    documents: Tensor | None = None
    """Only of preferences: (B, D), the log-probability of each document."""


def with_ahead(sums: LossSums, ahead: Sequence[LossSums], weight: float) -> LossSums:
    """Add the losses of the tokens further ahead: weight / N · the sum over N of them, each a sum over its own targets.

    Divided by `count`, this is the loss of DeepSeek-V3 (arXiv 2412.19437, equations 24 and 25): each of the N means is over
    the targets of the next token, of which a few more count at the ends of sequences.
    """
    loss = torch.stack([each.loss for each in ahead]).sum() * (weight / len(ahead))
    nll = torch.stack([each.nll for each in ahead]).sum()
    count = torch.stack([each.count for each in ahead]).sum()
    return sums._replace(loss=sums.loss + loss, means=torch.stack((nll, count.to(nll.dtype)))[None])


def with_routers(sums: LossSums, routers: Sequence[RouterSums]) -> LossSums:
    """Add the losses of the routers, which are sums over the same targets, and what they count."""
    of_all = RouterSums(*map(torch.stack, zip(*routers, strict=True)))
    loss = sums.loss + of_all.loss.sum().to(sums.loss.dtype)
    return sums._replace(loss=loss, router=of_all._replace(loss=of_all.loss.detach()))


class VocabularyShards(NamedTuple):
    """States that ``weight`` is this rank's shard of the output matrix: V consecutive rows, equally many on every rank.

    Every rank of the group must call with the same ``hidden``, ``targets`` and settings. The caller must sum the gradient of
    ``hidden`` over the group: each rank's is the *partial sum* through its own columns. The gradient of ``weight`` is complete
    for this rank's rows. All tensors are plain ones, not DTensors.
    """

    group: dist.ProcessGroup
    """The ranks that hold the shards of one output matrix."""
    first_row: int
    """Row of the whole (padded) output matrix that is row 0 of this rank's ``weight``: a multiple of V."""


def logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
    shards: VocabularyShards | None = None,
) -> Tensor:
    """Logits of real token ids in at least float32: (..., d), (V, d) → (..., vocab_size). Respects autocast.

    With ``shards``, every rank gets all logits, for text generation. The all-gather is not differentiable.
    """
    # Include the padding in the product, for GPU alignment, and cut it afterwards.
    z = F.linear(hidden, weight)
    if shards is not None:
        z = z.detach().contiguous()
        parts = [torch.empty_like(z) for _ in range(shards.group.size())]
        dist.all_gather(parts, z, group=shards.group)
        z = torch.cat(parts, dim=-1)
    assert 0 < vocab_size <= z.shape[-1], (vocab_size, weight.shape)
    z = z[..., :vocab_size]
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
    by_row: bool = False,
    shards: VocabularyShards | None = None,
) -> LossSums:
    """Cross-entropy with full logits. Fastest for small vocabularies; stores (N, V) several times.

    With ``shards``, calls `chunked_cross_entropy` with one chunk of all rows, which stores (N, V) once.

    Args:
        hidden: (..., d) final hidden states.
        weight: (V, d) output matrix; rows ≥ ``vocab_size`` are padding: not in the logsumexp, gradient exactly zero.
        targets: (...) int64, leading shape of ``hidden``; ``ignore_index`` is left out of the sums and the count.
        vocab_size: rows without padding of the whole output matrix, even if ``weight`` is a shard.
        by_row: also sum over each sequence: ``targets`` are (B, T). The gradients stay the same bits.
        shards: describes the shard if ``weight`` is this rank's part of the output matrix; None: ``weight`` is the whole.

    Raises:
        IndexError: if a target is neither ``ignore_index`` nor in [0, vocab_size) (a device-side assert on CUDA). With
            ``shards`` every rank raises it before any communication.
    """
    if shards is not None:
        return chunked_cross_entropy(
            hidden,
            weight,
            targets,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            softcap=softcap,
            z_loss=z_loss,
            by_row=by_row,
            chunk_size=max(1, targets.numel()),
            shards=shards,
        )
    _check(hidden, weight, targets, vocab_size, shards)
    z = logits(hidden.reshape(-1, hidden.shape[-1]), weight, vocab_size=vocab_size, softcap=softcap)  # (N, vocab_size)
    return cross_entropy_of_logits(z, targets, ignore_index=ignore_index, z_loss=z_loss, by_row=by_row)


def cross_entropy_of_logits(
    z: Tensor, targets: Tensor, *, ignore_index: int = -100, z_loss: float = 0.0, by_row: bool = False
) -> LossSums:
    """The loss sums of given logits, in their dtype.

    Args:
        z: (..., V) logits, without padding columns.
        targets: (...) int64, as many as rows of ``z``.
        by_row: as `cross_entropy`.

    Raises:
        IndexError: as `cross_entropy`.
    """
    shape = targets.shape
    z, targets = z.reshape(-1, z.shape[-1]), targets.reshape(-1)  # (N, V), (N,)
    counted = targets != ignore_index
    rows: tuple[Tensor, Tensor] | tuple[()] = ()
    if by_row:
        each = F.cross_entropy(z, targets, ignore_index=ignore_index, reduction="none")  # (N,), 0 where ignored
        loss = each.sum()
        rows = _by_row(each.detach(), counted, shape)
    else:
        loss = F.cross_entropy(z, targets, ignore_index=ignore_index, reduction="sum")
    nll = loss.detach()
    if z_loss:
        loss = loss + z_loss * (torch.logsumexp(z, dim=-1).square() * counted).sum()
    return LossSums(loss, nll, counted.sum(), *rows)


def _by_row(nll: Tensor, counted: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Sums of the NLL (N,) and of the counted targets (N,) over each row of `shape`, (B, T)."""
    assert len(shape) == 2, f"by_row needs targets of shape (B, T), not {tuple(shape)}"
    return nll.view(shape).sum(dim=1), counted.view(shape).sum(dim=1)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
    by_row: bool = False,
    chunk_size: int = CHUNK_SIZE,
    shards: VocabularyShards | None = None,
) -> LossSums:
    """`cross_entropy` in chunks of ``chunk_size`` rows: memory of O(C·V) instead of O(N·V), plus the two gradients.

    The gradients are computed in the forward pass, while a chunk's logits exist, and only scaled in the backward pass.
    So the result can be differentiated once: a second backward (``retain_graph=True``) or a double backward raises
    RuntimeError. Gradients that are not needed (``no_grad``, frozen weight) are not computed. The gradient of ``weight`` is
    summed over chunks in float32 (float64 for float64 inputs), regardless of the autocast dtype.

    Arguments, result and errors are those of `cross_entropy`.
    """
    if chunk_size < 1:
        raise UserError(f"chunk_size is {chunk_size}, but must be at least 1 (--loss.chunk_size).")
    shape = targets.shape
    rows = _rows(hidden, weight, targets, vocab_size, ignore_index, shards)
    settings = _Settings(_columns(weight, vocab_size, shards), softcap, z_loss, chunk_size, shards)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss, nll, each = _ChunkedCrossEntropy.apply(*rows, settings)
    else:
        loss, nll, each, _, _ = _forward(*rows, settings, need_hidden=False, need_weight=False)
    counted = rows[-1]
    return LossSums(loss, nll, counted.sum(), *(_by_row(each, counted, shape) if by_row else ()))


def token_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    softcap: float | None = None,
    chunk_size: int | None = None,
    shards: VocabularyShards | None = None,
) -> Tensor:
    """The NLL of each target in nats, 0 where it is ignored: for losses that are no sum over tokens.

    Shape of ``targets``, float32 (float64 for float64 inputs). The forward pass keeps no logits. The backward pass computes
    them again, ``chunk_size`` rows at a time (None: all): it costs one product more than `chunked_cross_entropy`, and as much
    memory. Arguments and errors are those of `cross_entropy`.
    """
    rows = _rows(hidden, weight, targets, vocab_size, ignore_index, shards)
    chunk_size = max(1, targets.numel()) if chunk_size is None else chunk_size
    settings = _Settings(_columns(weight, vocab_size, shards), softcap, 0.0, chunk_size, shards)
    each: Tensor = _TokenNLL.apply(*rows, settings)
    return each.view(targets.shape)


def _rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, shards: VocabularyShards | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checked: hidden (N, d), weight, targets (N,) and which of them count (N,) bool."""
    _check(hidden, weight, targets, vocab_size, shards)
    targets = targets.reshape(-1)
    counted = targets != ignore_index
    # Ignored rows stay in the products, with id 0: dropping them would need their positions on the host.
    targets = torch.where(counted, targets, 0)
    _check_range(targets, vocab_size)
    return hidden.reshape(-1, hidden.shape[-1]), weight, targets, counted


def _columns(weight: Tensor, vocab_size: int, shards: VocabularyShards | None) -> int:
    return vocab_size if shards is None else min(max(vocab_size - shards.first_row, 0), weight.shape[0])


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, shards: VocabularyShards | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        # Detects a DTensor without importing its class, which takes 0.7 s.
        assert not hasattr(tensor, "to_local"), f"{name} is a DTensor; the loss takes plain local tensors, and `shards`"
    assert hidden.shape[:-1] == targets.shape, (hidden.shape, targets.shape)
    rows, ranks = weight.shape[0], 1 if shards is None else shards.group.size()
    assert 0 < vocab_size <= rows * ranks, (vocab_size, weight.shape, ranks)
    assert shards is None or shards.first_row in range(0, rows * ranks, rows), (shards, weight.shape, ranks)


def _check_range(targets: Tensor, vocab_size: int) -> None:
    """Check all targets on every rank, so that all ranks raise."""
    if targets.device.type == "cpu":
        wrong = targets[(targets < 0) | (targets >= vocab_size)]
        if len(wrong):
            raise IndexError(f"Target {wrong[0]} is out of bounds: the vocabulary has {vocab_size} tokens.")
    else:  # gather from an expanded 1-element tensor: a bounds check on the device, without a synchronisation
        targets.new_zeros(1).expand(vocab_size).gather(0, targets)


class _Settings(NamedTuple):
    columns: int
    """Leading columns of h Wᵀ that are not padding; may be 0 with `shards`."""
    softcap: float | None
    z_loss: float
    chunk_size: int
    shards: VocabularyShards | None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        need_hidden, need_weight, *_ = ctx.needs_input_grad
        loss, nll, each, *ctx.gradients = _forward(
            hidden, weight, targets, counted, settings, need_hidden=need_hidden, need_weight=need_weight
        )
        ctx.dtypes = _gradient_dtypes(hidden, weight)
        ctx.mark_non_differentiable(nll, each)
        return loss, nll, each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("chunked_cross_entropy can be differentiated only once: the first backward frees its gradients.")
        # Scaled in place and released, so that the (V, d) gradient exists once and becomes weight.grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        grad_hidden, grad_weight = (
            None if g is None else g.mul_(grad_loss).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return grad_hidden, grad_weight, None, None, None


class _TokenNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, settings: _Settings) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets, counted)
        ctx.settings, ctx.dtypes = settings, _gradient_dtypes(hidden, weight)
        device = hidden.device.type  # autocast is off in the backward pass
        ctx.autocast = {"enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device)}
        return _forward(hidden, weight, targets, counted, settings, need_hidden=False, need_weight=False)[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, counted = ctx.saved_tensors
        need_hidden, need_weight, *_ = ctx.needs_input_grad
        with torch.autocast(hidden.device.type, **ctx.autocast):
            *_, grad_hidden, grad_weight = _forward(
                hidden, weight, targets, grad * counted, ctx.settings, need_hidden=need_hidden, need_weight=need_weight
            )
        gradients = zip((grad_hidden, grad_weight), ctx.dtypes, strict=True)
        return *(None if g is None else g.to(dtype) for g, dtype in gradients), None, None, None


def _gradient_dtypes(hidden: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """FSDP2 may give a narrow weight whose gradients are summed in fp32: then this one is not rounded either."""
    return hidden.dtype, (weight.is_leaf and weight.grad_dtype) or weight.dtype


def _forward(
    hidden: Tensor,  # (N, d)
    weight: Tensor,  # (V, d)
    targets: Tensor,  # (N,) int64 in [0, vocab_size), also in ignored rows
    counted: Tensor,  # (N,) bool, or the weight of each row
    settings: _Settings,
    *,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sums of loss and NLL, the NLL of each row (N,), and the gradients of the loss sum.

    The gradients are (N, d) in the compute dtype and (V, d) in the sum dtype.

    With shards the sums cover the whole vocabulary, the gradients only this rank's columns.
    """
    device = hidden.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    dtype, sum_dtype = weight.dtype, torch.promote_types(weight.dtype, torch.float32)
    rows, padded_size = hidden.shape[0], weight.shape[0]
    nll = torch.empty(rows, 1, dtype=sum_dtype, device=device)
    log_z = torch.empty_like(nll)
    grad_hidden = torch.empty_like(hidden) if need_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if need_weight else None

    # All chunks share buffers: new memory for each chunk costs page faults, a third of the time on a CPU. Matrix products
    # are faster with many rows at once. The softmax is not, and needs twice the bytes, so it runs in smaller blocks.
    product_block = torch.empty(min(chunk_size := settings.chunk_size, rows), padded_size, dtype=dtype, device=device)
    softmax_rows = max(1, SOFTMAX_NUMEL // padded_size)
    scratch = product_block.new_empty(2, min(softmax_rows, chunk_size, rows), padded_size, dtype=sum_dtype)
    term = torch.empty_like(weight) if need_weight and dtype != sum_dtype else None

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for start in range(0, rows, chunk_size):
            chunk = slice(start, min(start + chunk_size, rows))
            h = hidden[chunk]  # (C, d)
            product = torch.mm(h, weight.T, out=product_block[: h.shape[0]])  # (C, V)
            for first in range(chunk.start, chunk.stop, softmax_rows):
                block = slice(first, min(first + softmax_rows, chunk.stop))
                nll[block], log_z[block] = _softmax_to_gradient(
                    product[block.start - start : block.stop - start],
                    targets[block, None],
                    scratch[:, : block.stop - block.start],
                    settings,
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
    nll_sum = each.sum()
    z_loss_sum = settings.z_loss * (log_z[:, 0].square() * counted).sum() if settings.z_loss else 0.0
    return nll_sum + z_loss_sum, nll_sum, each, grad_hidden, grad_weight


def _softmax_to_gradient(
    product: Tensor,  # (R, V) rows of h Wᵀ; overwritten by the gradient of the loss with respect to them
    target: Tensor,  # (R, 1)
    scratch: Tensor,  # (2, R, V) in the sum dtype
    settings: _Settings,
    *,
    need_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """NLL and logsumexp of each row, (R, 1), as if every row counted."""
    columns, softcap, z_loss, _, shards = settings
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
        z_target, log_p_target, log_z = _sharded_softmax(z, torch.where(here, z.gather(1, target), 0), p, shards.group)
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
    return -log_p_target, log_z


def _sharded_softmax(
    z: Tensor,  # (R, V) logits of this rank's columns, -inf where padding
    z_target: Tensor,  # (R, 1) the target's logit on the rank with its column, else 0
    p: Tensor,  # (R, V) overwritten by this rank's columns of the softmax over all ranks' columns
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logit, its log-probability, and the logsumexp of each row, (R, 1): the same on every rank."""
    # In a shard of padding only, the largest logit is -inf, and -inf − -inf is NaN. The clamp avoids that.
    top = z.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)  # (R, 1)
    torch.sub(z, top, out=p).exp_()
    mine = torch.stack((top, p.sum(dim=-1, keepdim=True), z_target))  # (3, R, 1)
    everyone = mine.new_empty(group.size(), *mine.shape)
    dist.all_gather(list(everyone.unbind()), mine, group=group)
    tops, sums, z_targets = everyone.unbind(1)  # (ranks, R, 1)
    highest = tops.amax(dim=0)
    total = (sums * torch.exp(tops - highest)).sum(dim=0)  # Σ exp(z − highest)
    z_target, log_total = z_targets.sum(dim=0), total.log()
    p.mul_(torch.exp(top - highest) / total)
    # Subtract in this order: highest + log_total would round away the loss of a confident prediction.
    return z_target, z_target - highest - log_total, highest + log_total

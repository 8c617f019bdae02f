"""Next-token cross-entropy from hidden states: with full logits, or in chunks to save memory.

`cross_entropy` and `chunked_cross_entropy` take hidden states h and the output matrix W instead of logits. They return *sums*;
the caller divides by the token count of the global batch. Both functions compute the same value and gradient:

    z    = softcap · tanh(h Wᵀ / softcap)            (no softcap: z = h Wᵀ), without columns ≥ vocab_size
    nll  = logsumexp(z) − z[target]                  nats, summed over targets ≠ -100
    loss = nll + z_loss · logsumexp(z)²              (z-loss: PaLM, arXiv 2204.02311, section 5)

With multi-token prediction, `with_ahead` adds the losses of further tokens. `token_nll` gives the NLL of each token, for losses
that are not sums over tokens.

Letters: N rows (B·T), d width, V vocabulary rows of W including padding (with `VocabularyShards`: of this rank's shard of
W), C rows of one chunk, R rows of one block of a chunk's softmax.

Under tensor parallelism W is sharded by rows: each rank computes its columns of z, and no rank holds a whole row. Each block
of the softmax takes one all-gather of three numbers per row and rank: the greatest logit, the sum of exp(logit − greatest
logit), and the target's logit. Every rank then does the same arithmetic on the same numbers, so the sums are bitwise equal on
all ranks, which an all-reduce would not guarantee.

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
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lit_llm.core._torch import IGNORED
from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import STEPS, at_least, range_problems, whole
from lit_llm.models.chunked_loss import (
    CrossEntropyRows,
    RowNLL,
    VocabularyShards,
    check,
    checked_rows,
    chunked_loss,
    real_columns,
)
from lit_llm.models.distillation_loss import DistillationRows, TeacherLogits
from lit_llm.models.router import RouterSums

CHUNK_SIZE = 1024
"""Rows of a chunk. Each chunk reads W twice and adds to W's gradient. Half the rows save little (bf16: 0.63, not 0.68 GB)."""


@dataclass
class LossConfig:
    """Settings of the loss (group `loss` of a recipe)."""

    chunk_size: Annotated[int | None, whole(1, STEPS)] = None
    """Number of tokens whose logits are in memory at a time. None: all tokens. Chunks save memory for large vocabularies."""
    z_loss: Annotated[float, at_least(0, 1000)] = 0.0
    """Weight of logsumexp(logits)^2 in the training loss, which limits the growth of logits (PaLM: 1e-4). Not in metrics."""

    ahead_weight: Annotated[float, at_least(0, 1000)] = 0.3
    """Weight, in the training loss, of the mean loss of the further tokens that `model.predict_ahead` predicts (DeepSeek-V3:
    0.3, later 0.1). Only the metric `train/loss_ahead` shows this loss."""

    def problems(self) -> list[str]:
        return range_problems(LossConfig, "loss", vars(self))


LossHead = Literal["cross-entropy", "by document", "with a teacher"]
"""Kinds of losses that differ in memory and FLOPs. cross-entropy: `cross_entropy` or `chunked_cross_entropy`. by document:
`token_nll`. with a teacher: `chunked_cross_entropy` with a `teacher`, in one chunk if `loss.chunk_size` is null."""


class LossSums(NamedTuple):
    """Record of sums over the counted targets of one micro-batch, on the hidden states' device; 0-d where no shape is given."""

    loss: Tensor
    """Differentiable sum to minimise, of all losses with their weights; float32 (float64 for float64 inputs)."""
    nll: Tensor
    """Detached sum of the negative log-likelihood alone, in nats, in the dtype of `loss`. Perplexity is computed from `nll`."""
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    """Detached int64 number of targets ≠ -100."""
    row_nll: Tensor | None = None
    """Only with ``by_row``: the sum `nll` of each sequence, shape (B,), in the dtype of `loss`."""
    row_count: Tensor | None = None
    """Only with ``by_row``: the number of targets ≠ -100 of each sequence, shape (B,)."""
    router: RouterSums | None = None
    """Only with experts: the sums of L routers, (L, …), detached. `loss` includes the routers' losses."""
    means: Tensor | None = None
    """(k, 2): (sum, divisor) of each of k further metrics that are means. With `predict_ahead` k is 1: NLL and number of the
    further targets, whose loss `loss` includes. Otherwise, the objective names the metrics (`Objective.means`)."""
    documents: Tensor | None = None
    """Only for preference losses: (B, D), the log-probability of each of the D documents in a sequence of the batch."""


def with_ahead(sums: LossSums, ahead: Sequence[LossSums], weight: float) -> LossSums:
    """Add the losses of N further tokens (multi-token prediction) to the loss of next tokens: weight / N · the sum of `ahead`.

    In the returned sums, `means` has the NLL and the number of the further tokens.

    The caller divides by the number of next tokens, `count`. As in DeepSeek-V3 (arXiv 2412.19437, equations 24 and 25), this
    number also divides the losses of further tokens, although a sequence has fewer further targets than next tokens.
    """
    loss = torch.stack([each.loss for each in ahead]).sum() * (weight / len(ahead))
    nll = torch.stack([each.nll for each in ahead]).sum()
    count = torch.stack([each.count for each in ahead]).sum()
    return sums._replace(loss=sums.loss + loss, means=torch.stack((nll, count.to(nll.dtype)))[None])


def with_routers(sums: LossSums, routers: Sequence[RouterSums]) -> LossSums:
    """Return `sums` with the losses of the blocks' routers (sums over the same targets) added to `loss`. The routers' sums,
    stacked over the blocks, become the field `router`."""
    of_all = RouterSums(*map(torch.stack, zip(*routers, strict=True)))
    loss = sums.loss + of_all.loss.sum().to(sums.loss.dtype)
    return sums._replace(loss=loss, router=of_all._replace(loss=of_all.loss.detach()))


def logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
    shards: VocabularyShards | None = None,
) -> Tensor:
    """Logits without padding columns, in at least float32: (..., d), (V, d) → (..., vocab_size). Respects autocast.

    With ``shards``, an all-gather, which is not differentiable, gives every rank all logits, for text generation.
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
    softcap: float | None = None,
    z_loss: float = 0.0,
    by_row: bool = False,
    shards: VocabularyShards | None = None,
) -> LossSums:
    """Cross-entropy with full logits: faster than chunks for small vocabularies, but stores (N, V) several times.

    With ``shards``, calls `chunked_cross_entropy` with one chunk of all rows, which stores (N, V) once.

    Args:
        hidden: (..., d) final hidden states.
        weight: (V, d) output matrix; rows ≥ ``vocab_size`` are padding: not in the logsumexp, gradient exactly zero.
        targets: (...) int64, leading shape of ``hidden``; -100 is left out of the sums and the count.
        vocab_size: number of rows without padding of the whole output matrix, even if ``weight`` is a shard.
        by_row: also return sums over each sequence; ``targets`` must be (B, T). The gradients do not change by a bit.
        shards: describes the shard if ``weight`` is this rank's shard of the output matrix; None: ``weight`` is the whole.

    Raises:
        IndexError: a target is neither -100 nor in [0, vocab_size) (a device-side assert on CUDA). With
            ``shards`` every rank raises this error before any communication.
    """
    if shards is not None:
        return chunked_cross_entropy(
            hidden,
            weight,
            targets,
            vocab_size=vocab_size,
            softcap=softcap,
            z_loss=z_loss,
            by_row=by_row,
            chunk_size=max(1, targets.numel()),
            shards=shards,
        )
    check(hidden, weight, targets, vocab_size, shards)
    z = logits(hidden.reshape(-1, hidden.shape[-1]), weight, vocab_size=vocab_size, softcap=softcap)  # (N, vocab_size)
    return cross_entropy_of_logits(z, targets, z_loss=z_loss, by_row=by_row)


def cross_entropy_of_logits(z: Tensor, targets: Tensor, *, z_loss: float = 0.0, by_row: bool = False) -> LossSums:
    """Cross-entropy of given logits: the sums of the loss, in the dtype of the logits.

    Args:
        z: (..., V) logits, without padding columns.
        targets: (...) int64, one for each row of ``z``; -100 is ignored.
        by_row: also return sums over each sequence; ``targets`` must be (B, T).

    Raises:
        IndexError: a target is neither -100 nor in [0, V).
    """
    shape = targets.shape
    z, targets = z.reshape(-1, z.shape[-1]), targets.reshape(-1)  # (N, V), (N,)
    counted = targets != IGNORED
    rows: tuple[Tensor, Tensor] | tuple[()] = ()
    if by_row:
        each = F.cross_entropy(z, targets, reduction="none")  # (N,), 0 where ignored
        loss = each.sum()
        rows = _by_row(each.detach(), counted, shape)
    else:
        loss = F.cross_entropy(z, targets, reduction="sum")
    nll = loss.detach()
    if z_loss:
        loss = loss + z_loss * (torch.logsumexp(z, dim=-1).square() * counted).sum()
    return LossSums(loss, nll, counted.sum(), *rows)


def _by_row(nll: Tensor, counted: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Sum the NLL (N,) and the mask of counted targets (N,) over each sequence of `shape` (B, T). Returns two tensors (B,)."""
    assert len(shape) == 2, f"by_row needs targets of shape (B, T), not {tuple(shape)}"
    return nll.view(shape).sum(dim=1), counted.view(shape).sum(dim=1)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
    z_loss: float = 0.0,
    by_row: bool = False,
    chunk_size: int = CHUNK_SIZE,
    shards: VocabularyShards | None = None,
    teacher: TeacherLogits | None = None,
) -> LossSums:
    """`cross_entropy` in chunks of ``chunk_size`` rows: memory of O(C·V) instead of O(N·V), plus the two gradients.

    The gradients are computed in the forward pass, while a chunk's logits exist, and only scaled in the backward pass.
    So the result can be differentiated only once: a second backward (``retain_graph=True``) or a double backward raises
    RuntimeError. Gradients that are not needed (``no_grad``, frozen weight) are not computed. The gradient of ``weight`` is
    summed over chunks in float32 (float64 for float64 inputs), regardless of the autocast dtype.

    With ``teacher`` the loss is the distillation loss of `lit_llm.models.distillation_loss`, without z-loss, and
    `LossSums.means` has (sum of KL, number of targets with a teacher). Other arguments and errors are as in `cross_entropy`.
    """
    if chunk_size < 1:
        raise UserError(f"chunk_size is {chunk_size}, but must be at least 1 (--loss.chunk_size).")
    rows = checked_rows(hidden, weight, targets, vocab_size, shards)
    columns, counted, given = real_columns(weight, vocab_size, shards), rows[-1], None
    if teacher is not None:
        given = DistillationRows(teacher, vocab_size, columns, softcap, shards)
    loss, nll, each = chunked_loss(*rows, given or CrossEntropyRows(columns, softcap, z_loss, shards), chunk_size)
    sums = LossSums(loss, nll, counted.sum(), *(_by_row(each, counted, targets.shape) if by_row else ()))
    return sums if given is None else sums._replace(means=given.means(counted))


def token_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
    chunk_size: int | None = None,
    shards: VocabularyShards | None = None,
) -> Tensor:
    """Return the NLL of each target in nats, 0 for ignored targets: for losses that are not sums over tokens.

    The result has the shape of ``targets`` and is float32 (float64 for float64 inputs). The forward pass stores no logits. The
    backward pass computes the logits again, ``chunk_size`` rows at a time (None: all). This costs one matrix product more than
    `chunked_cross_entropy`, and as much memory. Other arguments and errors as in `cross_entropy`.
    """
    rows = checked_rows(hidden, weight, targets, vocab_size, shards)
    row_loss = CrossEntropyRows(real_columns(weight, vocab_size, shards), softcap, shards=shards)
    each: Tensor = RowNLL.apply(*rows, row_loss, max(1, targets.numel()) if chunk_size is None else chunk_size)
    return each.view(targets.shape)

"""Distillation from hidden states: cross-entropy, mixed with the divergence from a teacher's most likely ids.

Of each position, the teacher gives k ids with their probabilities p_1, …, p_k at the temperature τ. What it gives to all other
ids is one class more, p_R = 1 − Σ p_i, and the student's mass there is q_R. With the student's logits z:

    q    = softmax(z / τ),  q_R = Σ q_j over the ids beyond the teacher's k
    KL   = Σ p_i log(p_i / q_i) + p_R log(p_R / q_R)            forward: KL(teacher ‖ student) of k + 1 classes
    loss = (1 − weight) · nll + weight · τ² · KL                Hinton et al. 2015, arXiv 1503.02531, section 2

With k = V, p_R is 0 and KL is that of the whole distributions. Of the logits, within the k and beyond:

    ∂KL / ∂z_i = (q_i − p_i) / τ        ∂KL / ∂z_j = r_j (q_R − p_R) / τ,  r = softmax of z / τ over the ids beyond alone

q_R is a sum of exponentials of the logits beyond, because 1 − Σ q_i would cancel. Letters as in `lit_llm.models.chunked_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lit_llm.models.chunked_loss import VocabularyShards, checked_rows, chunked_loss, real_columns
from lit_llm.models.loss import LossSums, sums_by_row


def distillation(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    teacher_ids: Tensor,
    teacher_logp: Tensor,
    temperature: float,
    teacher_weight: float,
    vocab_size: int,
    ignore_index: int = -100,
    softcap: float | None = None,
    by_row: bool = False,
    chunk_size: int | None = None,
    shards: VocabularyShards | None = None,
) -> LossSums:
    """The sums of a micro-batch. `nll` is the cross-entropy alone, and `means` has the sum of KL and its number of positions.

    Memory is that of `chunked_cross_entropy`, whose rules about gradients hold here. Rounded probabilities whose sum exceeds 1
    are scaled to a sum of 1; with k = V all are.

    Args:
        hidden, weight, targets, vocab_size, ignore_index, softcap, by_row, shards: as of `cross_entropy`.
        teacher_ids: (..., k) integers in [0, vocab_size), all different, for each target.
        teacher_logp: (..., k) their log-probabilities at the temperature, below 0. Where the first is 0, there is no teacher,
            and no KL.
        temperature: τ.
        teacher_weight: of KL, 0 to 1.
        chunk_size: rows of a chunk. None: all.
    """
    rows = checked_rows(hidden, weight, targets, vocab_size, ignore_index, shards)
    ids, logp, counted = teacher_ids.flatten(0, -2), teacher_logp.flatten(0, -2), rows[-1]
    is_known = logp[:, :1] < 0  # (N, 1)
    ids = torch.where(is_known, ids, torch.arange(ids.shape[1], dtype=ids.dtype, device=ids.device))  # different ones
    row_loss = DistillationRows(
        *(ids, logp, temperature, teacher_weight, vocab_size, real_columns(weight, vocab_size, shards), softcap, shards),
        divergence=torch.zeros(len(ids), dtype=torch.promote_types(weight.dtype, torch.float32), device=hidden.device),
    )
    loss, nll, each = chunked_loss(*rows, row_loss, max(1, len(ids)) if chunk_size is None else chunk_size)
    divergence = (row_loss.divergence * counted).sum()
    sums = LossSums(loss, nll, counted.sum(), *(sums_by_row(each, counted, targets.shape) if by_row else ()))
    means = torch.stack((divergence, (counted & is_known[:, 0]).sum().to(divergence.dtype)))[None]
    return sums._replace(means=means)


@dataclass(frozen=True)
class DistillationRows:
    """The loss of each row, a `RowLoss`. (N, k) ids and log-probabilities; (N,) `divergence` is filled with the rows' KL."""

    ids: Tensor
    logp: Tensor
    temperature: float
    weight: float
    vocab_size: int
    columns: int
    softcap: float | None
    shards: VocabularyShards | None
    divergence: Tensor

    def scratch(self, product: Tensor, rows: int) -> Tensor:
        # The logits and, for each temperature, exponentials. The last column stands for ids of other ranks' columns.
        dtype = torch.promote_types(product.dtype, torch.float32)
        return product.new_empty(1 + len(self._temperatures), rows, product.shape[1] + 1, dtype=dtype)

    @property
    def _temperatures(self) -> tuple[float, ...]:
        return (1.0,) if self.temperature == 1 else (1.0, self.temperature)

    def __call__(
        self, product: Tensor, targets: Tensor, rows: slice, scratch: Tensor, *, need_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        z, *exponentials = scratch  # (R, V + 1) each
        width, softcap, tau = product.shape[1], self.softcap, self.temperature
        z[:, :width].copy_(product)
        if softcap is not None:
            z.div_(softcap).tanh_().mul_(softcap)
        z[:, self.columns :] = -torch.inf
        z[:, -1] = 0
        ids = torch.cat((targets, self.ids[rows]), dim=1) - (0 if self.shards is None else self.shards.first_row)  # (R, 1 + k)
        place = torch.where((ids >= 0) & (ids < self.columns), ids, width)
        own = z.gather(1, place)  # logits; 0 on ranks without the column
        z[:, -1] = -torch.inf
        z.scatter_(1, place[:, 1:], -torch.inf)  # leaves the ids beyond the teacher's
        # Without any, the greatest logit is -inf, and -inf − -inf is NaN. The clamp avoids that.
        top = z.amax(dim=1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)  # (R, 1)
        sums = []
        for e, t in zip(exponentials, self._temperatures, strict=True):
            torch.sub(z, top, out=e)
            sums.append((e if t == 1 else e.div_(t)).exp_().sum(dim=1, keepdim=True))
        everyone = _gathered(torch.cat((top, *sums, own), dim=1), self.shards)  # (ranks, R, 1 + temperatures + 1 + k)
        tops, parts, logits = everyone.split([1, len(sums), 1 + self.ids.shape[1]], dim=2)
        logits = logits.sum(dim=0)  # (R, 1 + k): of the target, and of the teacher's ids
        rest_top = tops.amax(dim=0)  # (R, 1): the greatest logit beyond
        highest = torch.maximum(rest_top, logits[:, 1:].amax(dim=1, keepdim=True))
        of_temperatures = []
        for t, part in zip(self._temperatures, parts.unbind(dim=2), strict=True):
            rest = (part[..., None] * torch.exp((tops - rest_top) / t)).sum(dim=0)  # Σ exp((z − rest_top) / t) beyond
            above, shift = (logits - highest) / t, (rest_top - highest) / t
            log_total = (above[:, 1:].exp().sum(dim=1, keepdim=True) + shift.exp() * rest).log()
            # (R, 1 + k) log-probabilities, (R, 1) that of the class beyond, and what its exponentials are divided by.
            of_temperatures.append((above - log_total, shift + rest.log() - log_total, rest.clamp(min=1)))
        (logq, log_rest, sum_1), (logq_tau, log_rest_tau, sum_tau) = of_temperatures[0], of_temperatures[-1]

        logp, p_rest, is_known = self._teacher(rows, z.dtype)  # (R, k), (R, 1), (R, 1)
        p = logp.exp()
        beyond = torch.where(p_rest > 0, torch.xlogy(p_rest, p_rest) - p_rest * log_rest_tau, 0)
        divergence = ((p * (logp - logq_tau[:, 1:])).sum(dim=1, keepdim=True) + beyond) * is_known
        self.divergence[rows] = divergence[:, 0]
        nll, of_nll = -logq[:, :1], 1 - self.weight
        if need_gradient:
            of_teacher = self.weight * tau * is_known  # (R, 1)
            excess = of_teacher * (log_rest_tau.exp() - p_rest)
            factors = [of_nll * log_rest.exp(), excess]
            factors = factors if len(sums) == 2 else [factors[0] + factors[1]]
            grad = exponentials[0]
            for i, (e, t, factor, rest) in enumerate(
                zip(exponentials, self._temperatures, factors, (sum_1, sum_tau), strict=False)
            ):
                factor = factor * torch.exp((top - rest_top) / t) / rest
                grad = e.mul_(factor) if i == 0 else grad.addcmul_(e, factor)
            difference = of_teacher * (logq_tau[:, 1:].exp() - p)  # (R, k)
            is_target = self.ids[rows] == targets
            target_beyond = torch.exp(((logits[:, :1] - rest_top) / tau).clamp(max=0)) / sum_tau * excess
            target_kl = torch.where(is_target.any(dim=1, keepdim=True), (difference * is_target).sum(1, True), target_beyond)
            # expm1 computes the target's entry: softmax minus 1 would cancel if the model is confident.
            entries = torch.cat(
                (of_nll * torch.expm1(logq[:, :1]) + target_kl, of_nll * logq[:, 1:].exp() + difference), dim=1
            )  # (R, 1 + k)
            if softcap is not None:
                entries *= 1 - (logits / softcap).square()
                grad.addcmul_(grad, z.square_(), value=-1 / softcap**2)
            grad.scatter_(1, place[:, 1:], entries[:, 1:]).scatter_(1, place[:, :1], entries[:, :1])
            product.copy_(grad[:, :width])
            product[:, self.columns :] = 0
        return of_nll * nll + self.weight * tau**2 * divergence, nll

    def _teacher(self, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """log p (R, k), p_R (R, 1), and 1 where there is a teacher, else 0 (R, 1)."""
        logp = self.logp[rows].to(dtype)
        total = logp.logsumexp(dim=1, keepdim=True)  # log Σ p_i; rounding may make it positive
        surplus = total if logp.shape[1] >= self.vocab_size else total.clamp(min=0)
        return logp - surplus, -torch.expm1(total - surplus), (logp[:, :1] < 0).to(dtype)


def _gathered(values: Tensor, shards: VocabularyShards | None) -> Tensor:
    """The values of all ranks, (ranks, …): one rank without shards."""
    if shards is None:
        return values[None]
    everyone = values.new_empty(shards.group.size(), *values.shape)
    dist.all_gather(list(everyone.unbind()), values, group=shards.group)
    return everyone

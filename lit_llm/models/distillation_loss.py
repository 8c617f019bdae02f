"""Distillation loss from hidden states: cross-entropy, mixed with the KL divergence from a teacher's top-k probabilities.

At each position, the teacher gives k ids with their probabilities p_1, …, p_k at the temperature τ. All other ids form one more
class, with probability p_R = 1 − Σ p_i for the teacher and q_R for the student. With the student's logits z:

    q    = softmax(z / τ),  q_R = Σ q_j over the ids beyond the teacher's k
    KL   = Σ p_i log(p_i / q_i) + p_R log(p_R / q_R)            forward: KL(teacher ‖ student) of k + 1 classes
    loss = (1 − weight) · nll + weight · τ² · KL                Hinton et al. 2015, arXiv 1503.02531, section 2

With k = V, p_R is 0 and KL compares the whole distributions. The gradients of logits z_i of the k ids and z_j of other ids are

    ∂KL / ∂z_i = (q_i − p_i) / τ        ∂KL / ∂z_j = r_j (q_R − p_R) / τ,  r = softmax of z / τ over the ids beyond alone

q_R is computed as a sum over the other ids, because 1 − Σ q_i would lose digits. Letters as in `lit_llm.models.chunked_loss`.
In the code, "beyond" and "rest" mean the ids that are not among the teacher's k ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_llm.models.chunked_loss import VocabularyShards, gathered


class TeacherLogits(NamedTuple):
    """Record of the teacher's k most likely ids at each position, with their log-probabilities."""

    ids: Tensor
    """(..., k) integers in [0, vocab_size), all different at one position. The leading dimensions are the targets' shape."""
    logp: Tensor
    """(..., k) log-probabilities of the ids, below 0. A position whose first value is 0 has no teacher, and its KL is 0. If
    rounding makes the sum of the k probabilities exceed 1, or if k = V, the loss scales the probabilities to a sum of 1."""
    temperature: float
    """Temperature τ at which the teacher's probabilities were computed."""
    weight: float
    """Weight of the KL divergence in the loss, 0 to 1."""


class DistillationRows:
    """The `RowLoss` of distillation: computes loss and gradient of some rows (tokens) from their logits and a teacher.

    `columns` is the result of `real_columns`. Call `means` after the loss is computed.
    """

    def __init__(
        self, teacher: TeacherLogits, vocab_size: int, columns: int, softcap: float | None, shards: VocabularyShards | None
    ) -> None:
        self.columns, self.softcap, self.shards = columns, softcap, shards
        self.tau, self.weight = teacher.temperature, teacher.weight
        self.temperatures = (1.0,) if self.tau == 1 else (1.0, self.tau)
        ids, self.logp = teacher.ids.flatten(0, -2), teacher.logp.flatten(0, -2)  # (N, k)
        self.is_known, self.is_whole = self.logp[:, :1] < 0, ids.shape[1] >= vocab_size  # (N, 1) bool
        self.ids = torch.where(self.is_known, ids, torch.arange(ids.shape[1], device=ids.device))  # all different

    def scratch(self, product: Tensor, rows: int) -> Tensor:
        # The logits and, for each temperature, exponentials. The last column stands for ids in other ranks' columns.
        dtype = torch.promote_types(product.dtype, torch.float32)
        self.divergence = product.new_zeros(len(self.ids), 1, dtype=dtype)
        return product.new_empty(1 + len(self.temperatures), rows, product.shape[1] + 1, dtype=dtype)

    def means(self, counted: Tensor) -> Tensor:
        """Return (1, 2): sum of KL over the positions in `counted` (N,) bool that have a teacher, number of these positions."""
        counts = self.is_known[:, 0] & counted
        return torch.stack(((self.divergence[:, 0] * counts).sum(), counts.sum()))[None]

    def __call__(
        self, product: Tensor, targets: Tensor, rows: slice, scratch: Tensor, *, need_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        z, *exponentials = scratch  # (R, V + 1) each
        width, softcap, tau = product.shape[1], self.softcap, self.tau
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
        # Without such ids the greatest logit is -inf, and -inf − -inf is NaN. The clamp avoids that.
        top = z.amax(dim=1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)  # (R, 1)
        sums = []
        for e, t in zip(exponentials, self.temperatures, strict=True):
            torch.sub(z, top, out=e)
            sums.append((e if t == 1 else e.div_(t)).exp_().sum(dim=1, keepdim=True))
        everyone = gathered(torch.cat((top, *sums, own), dim=1), self.shards)  # (ranks, R, 1 + temperatures + 1 + k)
        tops, parts, logits = everyone.split([1, len(sums), 1 + self.ids.shape[1]], dim=2)
        logits = logits.sum(dim=0)  # (R, 1 + k): of the target, and of the teacher's ids
        rest_top = tops.amax(dim=0)  # (R, 1): the greatest logit beyond
        highest = torch.maximum(rest_top, logits[:, 1:].amax(dim=1, keepdim=True))
        of_temperatures = []
        for t, part in zip(self.temperatures, parts.unbind(dim=2), strict=True):
            rest = (part[..., None] * torch.exp((tops - rest_top) / t)).sum(dim=0)  # Σ exp((z − rest_top) / t) beyond
            above, shift = (logits - highest) / t, (rest_top - highest) / t
            log_total = (above[:, 1:].exp().sum(dim=1, keepdim=True) + shift.exp() * rest).log()
            # (R, 1 + k) log-probabilities, (R, 1) log-probability of the class beyond, and the divisor of its exponentials.
            of_temperatures.append((above - log_total, shift + rest.log() - log_total, rest.clamp(min=1)))
        (logq, log_rest, _), (logq_tau, log_rest_tau, sum_tau) = of_temperatures[0], of_temperatures[-1]

        logp, is_known = self.logp[rows].to(z.dtype), self.is_known[rows].to(z.dtype)
        log_sum = logp.logsumexp(dim=1, keepdim=True)  # rounding may make it positive
        surplus = log_sum if self.is_whole else log_sum.clamp(min=0)
        logp, p_rest = logp - surplus, -torch.expm1(log_sum - surplus)  # (R, k), (R, 1)
        p = logp.exp()
        beyond = torch.where(p_rest > 0, torch.xlogy(p_rest, p_rest) - p_rest * log_rest_tau, 0)
        divergence = ((p * (logp - logq_tau[:, 1:])).sum(dim=1, keepdim=True) + beyond) * is_known
        self.divergence[rows] = divergence
        nll, of_nll = -logq[:, :1], 1 - self.weight
        if need_gradient:
            of_teacher = self.weight * tau * is_known  # (R, 1)
            excess = of_teacher * (log_rest_tau.exp() - p_rest)
            factors = [of_nll * log_rest.exp(), excess]
            factors = factors if len(sums) == 2 else [factors[0] + excess]
            for e, t, factor, (*_, rest) in zip(exponentials, self.temperatures, factors, of_temperatures, strict=True):
                e.mul_(factor * torch.exp((top - rest_top) / t) / rest)
            grad = exponentials[0] if len(sums) == 1 else exponentials[0].add_(exponentials[1])
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

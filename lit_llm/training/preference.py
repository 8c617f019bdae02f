"""Preference losses: make the chosen one of two answers to a prompt likelier than the rejected one.

y_w is the chosen and y_l the rejected document of a pair, log π(y) the sum of the log-probabilities of the answer's tokens,
|y| the number of these tokens, π_ref the model with the weights at the start of training, σ the logistic function, and ε
`label_smoothing`:

    dpo    s = log π(y) − log π_ref(y)               h = β (s_w − s_l)        −(1 − ε) log σ(h) − ε log σ(−h)
    ipo    s = (log π(y) − log π_ref(y)) / |y|       h = s_w − s_l            (h − 1 / (2β))²
    simpo  s = log π(y) / |y|                        h = β (s_w − s_l) − γ    −(1 − ε) log σ(h) − ε log σ(−h)

dpo: Rafailov et al. 2023, arXiv 2305.18290, equation 7; with ε conservative DPO (Mitchell 2023): labels are wrong with
probability ε. ipo: Azar et al. 2023, arXiv 2310.12036, equation 17, whose authors divide by |y|. simpo: Meng et al. 2024, arXiv
2405.14734, equation 6.

Letters: B rows, T positions, D documents (the most that a row of the batch has), P = D / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_llm.core._torch import IGNORED, all_gather_rows
from lit_llm.core.number_domain import above, at_least, below, range_problems
from lit_llm.models.config import GPTConfig
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT, LossFunction
from lit_llm.models.loss import LossConfig, LossSums, token_nll
from lit_llm.models.sequence_shard import SequenceShard
from lit_llm.training.accumulation import wide
from lit_llm.training.objective import Objective

Loss = Literal["dpo", "ipo", "simpo"]
_MEANS = ("reward_chosen", "reward_rejected", "margin", "accuracy", "logp_chosen", "logp_rejected")


class Preference(Objective):
    """Objective that prefers the chosen answer of each pair to the rejected one, by the loss of DPO, IPO or SimPO.

    Logs for train and val, as means over the pairs of the global batch: loss; reward_chosen and reward_rejected, β times the
    score s (dpo: log π(y) − log π_ref(y); ipo: that / |y|; simpo: log π(y) / |y|); margin, the difference of the two rewards;
    accuracy, the share of positive margins (a margin of 0 counts half); logp_chosen and logp_rejected (nats per document). With
    a reference also kl (nats per token): the mean of log π_ref − log π over the tokens of both answers, an estimate of
    KL(π_ref ‖ π) that takes the answers for samples of π_ref, and may be negative.

    Args:
        loss: dpo, ipo, or simpo, which needs no reference.
        beta: β. dpo: weight of staying near the reference; simpo: scale of rewards, 2 to 2.5 in the paper.
        label_smoothing: ε, below 0.5. Not for ipo.
        gamma: γ of simpo: the margin by which the chosen reward shall exceed the rejected reward.
    """

    of_tokens = False
    uses_pairs = needs_gpt = True
    loss_head = "by document"

    def __init__(
        self,
        loss: Loss = "dpo",
        beta: Annotated[float, above(0, 1000)] = 0.1,
        label_smoothing: Annotated[float, below(0, 0.5)] = 0.0,
        gamma: Annotated[float, at_least(0, 1000)] = 0.0,
    ) -> None:
        self.loss, self.beta, self.label_smoothing, self.gamma = loss, beta, label_smoothing, gamma
        self.uses_reference = loss != "simpo"

    def means(self, model: GPTConfig) -> tuple[str, ...]:
        return (*_MEANS, *(("kl",) if self.uses_reference else ()))

    def problems(self, parts: Mapping[str, Any]) -> list[str]:
        problems = range_problems(Preference, "objective", vars(self))
        if self.loss not in get_args(Loss):
            problems.append(f"objective.loss is {self.loss!r}, but must be dpo, ipo or simpo (--objective.loss)")
        if self.loss == "ipo" and self.label_smoothing:
            problems.append("objective.label_smoothing has no meaning for ipo (--objective.label_smoothing 0)")
        if self.loss != "simpo" and self.gamma:
            problems.append(f"objective.gamma belongs to simpo, not to {self.loss} (--objective.gamma 0)")
        model, loss = parts.get("model"), parts.get("loss")
        if model is not None:
            if not model.mask_documents:
                problems.append("pairs share a row, so their documents must not see each other (--model.mask_documents true)")
            if model.predict_ahead:
                problems.append("preferences are about the next token only (--model.predict_ahead 0)")
            for name in ("balance", "sequence_balance", "z_loss"):
                if model.moe is not None and getattr(model.moe, name):
                    problems.append(f"model.moe.{name} is a mean over tokens, not over pairs (--model.moe.{name} 0)")
        if loss is not None and loss.z_loss:
            problems.append("preferences have no z-loss (--loss.z_loss 0)")
        return problems

    def function(self, batch: Mapping[str, Tensor], loss: LossConfig, model: GPT | CustomModel) -> LossFunction:
        assert isinstance(model, GPT), "`problems` refuses others"
        return partial(
            self.sums,
            documents=model.own_positions(batch["documents"], -1),
            reference=batch.get("reference"),
            slots=2 * batch["pairs"].size(1),
            chunk_size=loss.chunk_size,
            shard=model.sequence_shard,
        )

    def sums(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        documents: Tensor,
        slots: int,
        reference: Tensor | None = None,
        chunk_size: int | None = None,
        shard: SequenceShard | None = None,
        **head: Any,
    ) -> LossSums:
        """The loss sums over the pairs of a micro-batch: `count` is the number of pairs, and `nll` the sum of their losses.

        Args:
            documents: (B, T) ints, the document of each position in its row: for pair i, 2 i is the chosen, 2 i + 1 the other.
            slots: D, the largest number of documents in a row. Larger numbers are padding.
            reference: (B, D) log-probabilities of the documents under π_ref; None: zeros.
            shard: set if this rank has a part of each sequence. Log-probabilities are then added over the ranks, and each rank
                has the gradient of its positions. Only rank 0 returns non-zero sums, because the caller adds the sums of ranks.
            head: further arguments of `token_nll`.
        """
        nll = token_nll(hidden, weight, targets, chunk_size=chunk_size, **head)  # (B, T)
        here = documents[:, None] == torch.arange(slots, device=documents.device)[:, None]  # (B, D, T) bool
        logp = -torch.where(here, nll.to(wide(nll.device))[:, None], 0).sum(dim=-1)  # (B, D)
        tokens = (here & (targets != IGNORED)[:, None]).sum(dim=-1)  # (B, D)
        if shard is not None:
            logp, tokens = _sum_over_ranks(logp, shard), _sum_over_ranks(tokens, shard)
        sums = self.of_documents(logp, tokens, reference)
        if shard is not None and shard.rank:
            assert sums.means is not None
            sums = sums._replace(nll=sums.nll * 0, count=sums.count * 0, means=sums.means * 0)
        return sums

    def of_documents(self, logp: Tensor, tokens: Tensor, reference: Tensor | None = None) -> LossSums:
        """The loss sums over pairs, from (B, D) tensors: log π(y), counted targets (0: no document), and log π_ref(y)."""
        ratio = logp if reference is None else logp - reference
        score = (ratio if self.loss == "dpo" else ratio / tokens.clamp(min=1)).unflatten(1, (-1, 2))  # (B, P, 2)
        counts = (tokens > 0).unflatten(1, (-1, 2)).all(dim=-1)  # (B, P)
        delta = score[..., 0] - score[..., 1]
        if self.loss == "ipo":
            each = (delta - 1 / (2 * self.beta)).square()
        else:
            h = self.beta * delta - self.gamma
            each = -(1 - self.label_smoothing) * F.logsigmoid(h) - self.label_smoothing * F.logsigmoid(-h)
        loss, count = torch.where(counts, each, 0).sum(), counts.sum()
        with torch.no_grad():
            reward, margin = self.beta * score, self.beta * delta
            values = [*reward.unbind(dim=-1), margin, 0.5 + 0.5 * margin.sign(), *logp.unflatten(1, (-1, 2)).unbind(dim=-1)]
            means = [torch.stack((torch.where(counts, value, 0).sum(), count.to(logp.dtype))) for value in values]
            if self.uses_reference:
                both = counts[..., None].expand_as(score).flatten(1)  # (B, D)
                of_both = torch.where(both, tokens, 0).sum().to(logp.dtype)
                means.append(torch.stack((-torch.where(both, ratio, 0).sum(), of_both)))
        return LossSums(loss, loss.detach(), count, means=torch.stack(means), documents=logp.detach())


def _sum_over_ranks(values: Tensor, shard: SequenceShard) -> Tensor:
    """Sum `values`, (B, D), over the ranks that share sequences; equal bit for bit on all ranks. A collective.

    The gradient passes only to this rank's `values`: each rank differentiates with respect to its own positions.
    """
    parts = all_gather_rows(values.detach()[None], shard.ranks, shard.group)  # (n, B, D)
    return parts.sum(dim=0) + (values - values.detach())

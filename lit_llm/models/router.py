"""The router of a mixture of experts, which chooses and weights the experts of each token, and the balancing losses.

Shape letters: B sequences, T positions, N = B · T tokens, d ``n_embd``, E experts, k experts of a token, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.core._torch import sum_over_ranks
from lit_llm.core.dtensor import differentiable_part
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.small_layers import KeepsPrecision


class RouterSums(NamedTuple):
    """Record of a router's sums over those tokens of a micro-batch whose targets count. The sums of L routers are stacked:
    each tensor is then (L, …)."""

    loss: Tensor
    """0-d, differentiable: weighted sum of the balancing losses and the z-loss. fp32 (float64 for float64 inputs)."""
    counts: Tensor
    """(E,) int64: number of counted tokens that each expert computed."""
    entropy: Tensor
    """0-d, detached: sum over tokens of the entropy of the router's probabilities, in nats."""
    z: Tensor
    """0-d, detached: sum over tokens of logsumexp(router logits)²."""

    def packed(self) -> Tensor:
        """Pack stacked sums for `end_step`: (L, E + 2) float64, for each block its counts, entropy and z."""
        return torch.cat((self.counts, torch.stack((self.entropy, self.z), dim=1).double()), dim=1)


class Routing(NamedTuple):
    """Record of a router's result for N tokens: chosen experts and their weights; logits and probabilities of all experts."""

    experts: Tensor
    """(N, k) int64, numbers of each token's experts, ascending, so that sums over experts do not depend on score order."""
    weights: Tensor
    """(N, k) fp32, the factors of the chosen experts' outputs."""
    logits: Tensor
    """(N, E) fp32, the router's logits."""
    probabilities: Tensor
    """(N, E) fp32, the scores normalised to a sum of 1 for each token."""


class Router(KeepsPrecision):
    """Scores all experts, and chooses k for each token (Σ: sum over these k, with `normalise`). Always computes in fp32.

        s = softmax(W x + b), or sigmoid(W x + b);   choice = the k largest of s + c;   weights = scale · s, or scale · s / Σ s

    c is `choice_bias`, which `ExpertBalance` moves (Wang et al. 2024, arXiv 2408.15664): c is not trained, and does not enter
    the weights. c is fp32, because steps of 0.001 would be lost in bf16. If scores are equal, the expert with the lower number
    is chosen, so that all processors and layouts of ranks choose the same experts.

    Losses, each a sum over the counted tokens of a block:

    * balance: E Σ_i share_i p_i, where p_i is the probability of expert i, and share_i its share of the tokens of the previous
      step's global batch. Fedus et al. 2022 (arXiv 2101.03961) use the current batch, known after its last micro-batch only;
    * sequence_balance: balance with the shares within each sequence (DeepSeek-V3, arXiv 2412.19437, section 2.1.2);
    * z_loss: logsumexp(logits)² (Zoph et al. 2022, arXiv 2202.08906).
    """

    choice_bias: Tensor
    shares: Tensor

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.sequence_groups: tuple[str, ...] = ()
        """Names of the process groups whose ranks each have a part of every sequence (context and tensor parallelism)."""
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        self.bias = nn.Parameter(torch.empty(config.experts)) if config.router_bias else None
        self.register_buffer("choice_bias", torch.empty(config.experts, dtype=torch.float32))
        self.register_buffer("shares", torch.empty(config.experts, dtype=torch.float32))

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Set every expert's `choice_bias` to 0, and its share of the tokens, in `shares`, to 1 / E."""
        self.choice_bias.zero_()
        self.shares.fill_(1 / self.config.experts)

    def forward(self, x: Tensor) -> Routing:
        """Choose experts for N tokens, x (N, d). Returns experts, weights, logits and probabilities as `Routing`."""
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            logits = self.logits(x.to(dtype))
            if self.config.router == "softmax":
                scores = probabilities = logits.softmax(dim=-1)
            else:
                scores = logits.sigmoid()
                probabilities = scores / scores.sum(dim=-1, keepdim=True).clamp(min=1e-20)
            experts = self.choose(scores.detach() + self.choice_bias)
            weights = scores.gather(1, experts)
            if self.config.normalise:
                weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
            if self.config.scale != 1.0:
                weights = weights * self.config.scale
        return Routing(experts, weights, logits, probabilities)

    def logits(self, x: Tensor) -> Tensor:
        """Return the router's logits, (N, d) → (N, E), in the dtype of x."""
        weight, bias = differentiable_part(self.weight), None if self.bias is None else differentiable_part(self.bias)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def choose(self, scores: Tensor) -> Tensor:
        """Return the numbers of the k experts with the largest scores within the best groups, ascending: (N, E) → (N, k)."""
        config = self.config
        groups, top_groups = config.effective_groups
        if top_groups < groups:
            grouped = scores.unflatten(1, (groups, -1))  # (N, G, E / G)
            best = grouped.topk(min(2, grouped.size(2)), dim=2).values.sum(dim=2)  # (N, G)
            kept = _largest(best, top_groups)
            is_kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
            scores = grouped.masked_fill(~is_kept[..., None], float("-inf")).flatten(1)
        return _largest(scores, config.top_k).sort(dim=1).values

    def sums(self, routing: Routing, counted: Tensor) -> RouterSums:
        """Return the sums over the tokens whose targets count. `counted`: (B, T) bool, True for such tokens of `routing`."""
        config, (batch, length) = self.config, counted.shape
        with torch.autocast(counted.device.type, enabled=False):
            p, where = routing.probabilities, counted.reshape(-1)  # (N, E), (N,)
            each = torch.zeros_like(p[:, 0])
            if config.balance:
                each = each + config.balance * config.experts * (p @ self.shares.to(p.dtype))
            z = torch.logsumexp(routing.logits, dim=-1).square()
            if config.z_loss:
                each = each + config.z_loss * z
            loss = each.where(where, 0).sum()
            chosen = where[:, None].expand_as(routing.experts).reshape(batch, -1).long()
            numbers = routing.experts.reshape(batch, -1)  # (B, T k)
            by_sequence = chosen.new_zeros(batch, config.experts).scatter_add(1, numbers, chosen)  # (B, E)
            if config.sequence_balance:
                mean = p.unflatten(0, (batch, length)).where(counted[..., None], 0).sum(dim=1)  # (B, E), times the targets
                whole = by_sequence
                for group in self.sequence_groups:
                    whole = sum_over_ranks(whole, group)
                own = whole.to(p.dtype)
                own = own / own.sum(dim=1, keepdim=True).clamp(min=1)
                loss = loss + config.sequence_balance * config.experts * (own * mean).sum()
            entropy = torch.special.entr(p.detach()).sum(dim=-1).where(where, 0).sum()
            z = z.detach().where(where, 0).sum()
        return RouterSums(loss, by_sequence.sum(dim=0), entropy, z)


def end_step(routers: list[Router], sums: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Set each router's `shares`, which its balancing loss uses in the following optimizer step, from this step's sums.

    Args:
        routers: the routers of the L blocks with experts. Routers of other pipeline stages are on the meta device: unchanged.
        sums: (L, E + 2), the sum of `RouterSums.packed` over all micro-batches and ranks of a step.

    Returns:
        (L, E), the number of tokens that each expert computed; and {"entropy": mean over tokens (L,), "z": mean (L,)}.
    """
    counts, of_tokens = sums[:, :-2], sums[:, -2:]
    # Not the step's count: an objective may count pairs, and ranks of tensor parallelism route a part of the positions.
    tokens = counts.sum(dim=1, keepdim=True) / routers[0].config.top_k
    means = of_tokens / tokens.clamp(min=1)
    for router, own in zip(routers, counts, strict=True):  # own: (E,)
        if not router.shares.is_meta:
            shares = own / own.sum().clamp(min=1)
            router.shares.copy_(torch.where(own.sum() > 0, shares, router.shares))
    return counts, {"entropy": means[:, 0], "z": means[:, 1]}


def initial_buffers(experts: int) -> dict[str, Tensor]:
    """Return {name: tensor}, the buffers `choice_bias` and `shares` of a new router of `experts` experts."""
    router = Router(MoEConfig(experts=experts, top_k=1), width=1)
    router.reset_buffers()
    return dict(router.named_buffers())


def _largest(scores: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest scores, (N, E) → (N, k). The first of equal scores wins, unlike in `topk`."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]

"""The settings of a mixture of experts (`model.moe`), and the rules between them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from lit_llm.core.number_domain import above, at_least, ranges_of, whole


@dataclass
class MoEConfig:
    """A mixture of experts in the place of the MLP: a router sends each token to `top_k` of `experts` MLPs. No token is
    dropped.

    All losses and counts are over the counted targets of the global batch, as the cross-entropy is: they do not depend on
    micro-batches, ranks or recomputation. The losses of all blocks are added.
    """

    experts: Annotated[int, whole(2, 100_000)] = 8
    """Number of routed experts of a block."""
    top_k: Annotated[int, whole(1, 100_000)] = 2
    """Number of routed experts that compute each token."""
    expert_width: Annotated[int | None, whole(1, 10_000_000)] = None
    """Hidden width of an expert. None: the MLP's hidden width."""
    shared_experts: Annotated[int, whole(0, 100_000)] = 0
    """Number of further experts that compute every token, together as one MLP (DeepSeek)."""
    shared_width: Annotated[int | None, whole(1, 10_000_000)] = None
    """Hidden width of a shared expert. None: expert_width."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to scores: softmax over all experts, or sigmoid of each logit (DeepSeek-V3)."""
    router_bias: bool = False
    """Whether the router's logits have a trained bias (gpt-oss)."""
    normalise: bool = True
    """Whether the weights of a token's experts are divided by their sum (true: Mixtral, Qwen3-MoE; false: OLMoE)."""
    scale: Annotated[float, above(0, 10**6)] = 1.0
    """Factor by which the weights of a token's experts are multiplied (DeepSeek-V3: 2.5)."""
    groups: Annotated[int, whole(1, 100_000)] = 1
    """Number of groups of consecutive experts; must divide experts."""
    top_groups: Annotated[int | None, whole(1, 100_000)] = None
    """Number of groups from which a token's experts are chosen: the groups whose two best scores have the largest sums
    (DeepSeek-V3). None: all groups."""
    first_dense: Annotated[int, whole(0, 4096)] = 0
    """Number of blocks at the start of the model that have a dense MLP instead of experts."""
    every: Annotated[int, whole(1, 4096)] = 1
    """After the first_dense blocks, every n-th block has experts (n is this value). 1: every block."""
    balance: Annotated[float, at_least(0, 1000)] = 0.0
    """Weight of the balancing loss (Switch Transformer): experts * sum(share of tokens * mean probability), 1 if balanced. The
    shares are counted in the previous optimizer step, so that the loss is a mean over targets."""
    sequence_balance: Annotated[float, at_least(0, 1000)] = 0.0
    """Weight of the balancing loss with shares of tokens within each sequence (DeepSeek-V3: 1e-4). Each sequence is weighted by
    its number of targets."""
    z_loss: Annotated[float, at_least(0, 1000)] = 0.0
    """Weight of logsumexp(router logits)^2, which limits the growth of the logits (ST-MoE: 1e-3)."""

    def width(self, mlp: int) -> int:
        """Hidden width of a routed expert in a model whose MLP has the hidden width `mlp`."""
        return mlp if self.expert_width is None else self.expert_width

    def width_of_shared(self, mlp: int) -> int:
        """Hidden width of all shared experts together, 0 without shared experts. `mlp`: hidden width of the model's MLP."""
        return self.shared_experts * (self.width(mlp) if self.shared_width is None else self.shared_width)

    @property
    def effective_groups(self) -> tuple[int, int]:
        """(number of groups of experts, number of groups from which a token's experts are chosen); (1, 1) if from all."""
        return (1, 1) if self.top_groups in (None, self.groups) else (self.groups, self.top_groups)

    def is_in(self, block: int) -> bool:
        """Whether the block with the number `block`, from 0, has experts."""
        return block >= self.first_dense and (block + 1 - self.first_dense) % self.every == 0

    def problems(self, n_layer: int | None) -> Iterator[tuple[str, str]]:
        """Yield (sentence, flags that mend the mistake) for each broken rule between settings. All numbers must be in range.

        Args:
            n_layer: number of blocks of the model. None: a pattern of `GPTConfig.layers` says which blocks have experts.
        """
        if self.top_k > self.experts:
            yield (
                f"model.moe.top_k is {self.top_k}, but there are {self.experts} experts: use at most {self.experts}",
                "--model.moe.top_k or --model.moe.experts",
            )
        top_groups = self.groups if self.top_groups is None else self.top_groups
        if self.experts % self.groups:
            near = sorted((k for k in range(1, self.experts + 1) if self.experts % k == 0), key=lambda k: abs(k - self.groups))
            yield (
                f"model.moe.groups={self.groups} does not divide model.moe.experts={self.experts}; the nearest value that does "
                f"is {near[0]}",
                "--model.moe.groups",
            )
        elif top_groups > self.groups:
            yield (
                f"model.moe.top_groups is {top_groups}, but there are {self.groups} groups: use at most {self.groups}",
                "--model.moe.top_groups",
            )
        elif (most := top_groups * (self.experts // self.groups)) < self.top_k <= self.experts:
            yield (
                f"model.moe.top_k is {self.top_k}, but {top_groups} of {self.groups} groups have {most} experts: use at most "
                f"{most}, or {-(-self.top_k * self.groups // self.experts)} groups",
                "--model.moe.top_k or --model.moe.top_groups",
            )
        if self.shared_width is not None and not self.shared_experts:
            yield (
                f"model.moe.shared_width is {self.shared_width}, but there are no shared experts",
                "--model.moe.shared_experts 1, or --model.moe.shared_width null",
            )
        if n_layer is not None and not any(map(self.is_in, range(n_layer))):
            yield (
                f"model.moe has no block: first_dense is {self.first_dense} and every {self.every}, of {n_layer} blocks",
                "--model.moe.first_dense 0 --model.moe.every 1, or --model.moe null",
            )


MOE_DOMAINS = ranges_of(MoEConfig)
"""{field: range} for each numeric field of MoEConfig."""

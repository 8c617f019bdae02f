"""Useful FLOPs per token, the price of device time, and the Chinchilla estimate of the final loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_llm.plan.weights import OwnModel, PlannedModel, weights_of

if TYPE_CHECKING:
    from lit_llm.models.lora import LoRAConfig

CONVENTION = (  # what counts as useful FLOPs
    "6 N_matmul + 12 L H h min(T, window), full attention, recomputation not counted; with lora 4 N_matmul + 6 N_adapters"
)
CUSTOM_CONVENTION = "FLOPs of matrix products, convolutions and attention that kernels execute, recomputation not counted"


@dataclass(frozen=True)
class FlopsPerToken:
    """Record of training FLOPs per token: a multiply-add is two FLOPs, and a backward pass costs twice the forward pass.

    Attributes:
        matmul: 6·N_matmul for N_matmul elements of matrices, with a tied head once, without embedding look-ups (Kaplan 2020).
        attention: 12·L·H·h·min(T, window) for L layers, H heads of width h and T tokens: the FLOPs of Q·Kᵀ and of its product
            with V, without the causal mask (PaLM, appendix B).
        attention_causal: the FLOPs of `attention` that a causal mask does not mask out, about half.
    """

    matmul: float
    attention: float
    attention_causal: float

    @property
    def total(self) -> float:
        """The useful FLOPs per token that MFU counts: `matmul` + `attention`."""
        return self.matmul + self.attention


def flops_per_token(model: PlannedModel, lora: LoRAConfig | None = None, length: int | None = None) -> FlopsPerToken:
    """Return the useful FLOPs per training token in sequences of `length` tokens, as `GPTConfig.flops_per_token` counts them.

    `length` None: the block size of the model.
    With `lora`, no gradients of the frozen matrices are computed: 4 FLOPs per frozen parameter instead of 6.
    For a custom model, a trace counts the FLOPs that the model's kernels execute. Which of them a causal mask saves is unknown,
    so `attention_causal` equals `attention`.
    """
    if isinstance(model, OwnModel):
        from lit_llm.models.own_flops import own_flops_per_token  # imports torch

        assert model.vocab_size is not None
        matmul, attention = own_flops_per_token(model.architecture, model.vocab_size, length or model.block_size)
        return FlopsPerToken(matmul, attention, attention)
    length = length or model.block_size
    matmul = model.flops_per_token(0)
    attention = model.flops_per_token(length) - matmul
    if lora is not None:
        adapters = [weight for weight in weights_of(model, lora) if weight.part == "adapters"]
        active = 1.0 if model.moe is None else model.moe.top_k / model.moe.experts  # share of experts that a token uses
        matmul = 4 / 6 * matmul + 6 * sum(weight.total * (active if weight.experts else 1) for weight in adapters)
    spans = [min(length, model.layer(i).window or length) for i in range(model.n_blocks)]
    # Position t attends to min(t, window) positions: take the mean over the context.
    seen = sum(span * (span + 1) / 2 + (length - span) * span for span in spans) / length
    return FlopsPerToken(matmul, attention, attention * seen / sum(spans))


def cost_usd(seconds: float, devices: int, usd_hour: tuple[float, float]) -> tuple[float, float]:
    """Return (lowest, highest) cost in USD of `devices` devices for `seconds`. `usd_hour`: (lowest, highest) price."""
    hours = seconds / 3600 * devices
    return hours * usd_hour[0], hours * usd_hour[1]


TOKENS_PER_PARAMETER = 20.0
"""Training tokens for each parameter of a compute-optimal model (Hoffmann et al. 2022, approaches 1 and 2, table 3)."""


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """Return L(N, D) = 1.69 + 406.4/N^0.34 + 410.7/D^0.28 for N parameters and D tokens, in nats per token.

    Hoffmann et al. 2022, approach 3, fitted L to MassiveText with a vocabulary of 32,000. For other data, only differences
    between two values of L are meaningful.
    """
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28

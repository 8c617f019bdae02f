"""Useful FLOPs, time, cost, the best checkpoint interval, and the Chinchilla estimates of loss."""

from __future__ import annotations

import math
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
    """Training FLOPs per token, where a multiply-add is two FLOPs and the backward pass costs twice the forward pass.

    Attributes:
        matmul: 6·N_matmul. N_matmul counts a tied head once and excludes embedding look-ups (Kaplan et al. 2020).
        attention: 12·L·H·h·min(T, window) for the scores and their product with the values, without the causal mask
            (PaLM, appendix B). H·h = d unless head_dim is set.
        attention_causal: the part of `attention` that a causal mask leaves, about half.
    """

    matmul: float
    attention: float
    attention_causal: float

    @property
    def total(self) -> float:
        """The FLOPs that MFU counts; see CONVENTION."""
        return self.matmul + self.attention


def flops_per_token(model: PlannedModel, lora: LoRAConfig | None = None, length: int | None = None) -> FlopsPerToken:
    """Useful FLOPs per training token in sequences of `length` tokens, as `GPTConfig.flops_per_token` counts them.

    `length` None: the block size of the model.
    With `lora`, frozen matrices need no gradients of their own: 4 FLOPs per parameter instead of 6.
    Of a custom model: those that its kernels execute, counted in a trace. What a causal mask leaves is unknown.
    """
    if isinstance(model, OwnModel):
        from lit_llm.plan.own_trace import flops_per_token as of_own  # imports torch

        matmul, attention = of_own(model, length)
        return FlopsPerToken(matmul, attention, attention)
    length = length or model.block_size
    matmul = model.flops_per_token(0)
    attention = model.flops_per_token(length) - matmul
    if lora is not None:
        adapters = [weight for weight in weights_of(model, lora) if weight.part == "adapters"]
        active = 1.0 if model.moe is None else model.moe.top_k / model.moe.experts  # of those of experts
        matmul = 4 / 6 * matmul + 6 * sum(weight.total * (active if weight.experts else 1) for weight in adapters)
    spans = [min(length, model.layer(i).window or length) for i in range(model.n_blocks)]
    # Position t attends to min(t, window) positions: take the mean over the context.
    seen = sum(span * (span + 1) / 2 + (length - span) * span for span in spans) / length
    return FlopsPerToken(matmul, attention, attention * seen / sum(spans))


def cost_usd(seconds: float, devices: int, usd_hour: tuple[float, float]) -> tuple[float, float]:
    """Cost of `devices` devices for `seconds`, at the lowest and the highest price of a device-hour."""
    hours = seconds / 3600 * devices
    return hours * usd_hour[0], hours * usd_hour[1]


TOKENS_PER_PARAMETER = 20.0
"""The compute-optimal number (Hoffmann et al. 2022, approaches 1 and 2, table 3)."""


def chinchilla_multiple(parameters: float, tokens: float) -> float:
    """Tokens relative to the compute-optimal 20 per parameter: 1 is compute-optimal."""
    return tokens / (TOKENS_PER_PARAMETER * parameters)


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """L(N, D) = 1.69 + 406.4/N^0.34 + 410.7/D^0.28, nats per token (Hoffmann et al. 2022, approach 3).

    Fitted to MassiveText with a vocabulary of 32,000 and one epoch. On other data only differences are meaningful, roughly.
    """
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def lifetime_flops(parameters: float, train_tokens: float, served_tokens: float) -> float:
    """6·N·D for training plus 2·N per served token (Sardana & Frankle 2023)."""
    return 6 * parameters * train_tokens + 2 * parameters * served_tokens


def young_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Best interval between two checkpoints for which training waits so long: √(2 · T_save · MTBF) (Young 1974)."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def overhead_fraction(wait_seconds: float, interval_seconds: float, mtbf_seconds: float, write_seconds: float = 0.0) -> float:
    """Fraction of time lost to waiting for saves, wait/interval, and to redoing work after failures, interval/(2 · MTBF).

    A save in the background takes `write_seconds`, in which a failure finds the checkpoint before it: write/MTBF more. The next
    save waits for it.
    """
    wait_seconds += max(0.0, write_seconds - interval_seconds)
    return wait_seconds / interval_seconds + (max(interval_seconds, write_seconds) / 2 + write_seconds) / mtbf_seconds

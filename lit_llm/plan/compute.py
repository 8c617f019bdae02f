"""FLOPs, time, cost, and the Chinchilla estimates of loss. All arguments and results are plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lit_llm.plan.parameters import ModelShape, block_matrices, matmul_parameters

CONVENTION = "6 N_matmul + 12 L H h min(T, window), full attention, recomputation not counted"


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


def flops_per_token(model: ModelShape) -> FlopsPerToken:
    """Useful FLOPs per training token at the full context length."""
    length = model.block_size
    span = length if model.window is None else min(length, model.window)
    attention = 12.0 * model.n_layer * model.query_width * span
    # Position t attends to min(t, window) positions: take the mean over the context.
    seen = (span * (span + 1) / 2 + (length - span) * span) / length
    return FlopsPerToken(6.0 * matmul_parameters(model), attention, attention * seen / span)


def executed_flops_per_token(model: ModelShape, checkpointing: str = "none", *, cuda: bool = False) -> tuple[float, float]:
    """(matmul, attention) FLOPs per token that kernels execute, as torch's FlopCounterMode counts them.

    The backward pass of attention recomputes the scores, so it costs 2.5 forward passes instead of 2 (2 on a CPU with
    dropout, which keeps the weights). Masks and windows save nothing. A checkpointed block repeats its forward pass except
    the last matrix product, whose result is not needed again. The loss head is never recomputed.
    """
    layers = model.n_layer
    matrices = block_matrices(model)
    attention_matrices = matrices.query + matrices.key + matrices.value
    scores = 4.0 * model.query_width * model.block_size  # forward, per token and layer
    again_matmul = again_scores = 0.0
    if checkpointing == "full" or checkpointing.isdigit():
        every = 1 if checkpointing == "full" else int(checkpointing)
        again_matmul = 2.0 * (matrices.total - matrices.mlp_project) * -(-layers // every)
        again_scores = scores * -(-layers // every)
    elif checkpointing == "attention":
        again_matmul, again_scores = 2.0 * attention_matrices * layers, scores * layers
    passes = 3.0 if model.dropout and not cuda else 3.5
    return 6.0 * matmul_parameters(model) + again_matmul, passes * scores * layers + again_scores


def newton_schulz_flops(shapes: Mapping[tuple[int, int], int], steps: int = 5) -> float:
    """FLOPs of one Muon update: per r x c matrix (r ≤ c) and iteration, 2r²c (Gram matrix) + 2r³ (its square) + 2r²c."""
    return float(sum(count * steps * (4 * r * r * c + 2 * r**3) for (r, c), count in shapes.items()))


def seconds_at_mfu(flops: float, peak_tflops: float, mfu: float, devices: int = 1, efficiency: float = 1.0) -> float:
    """Time for `flops` useful FLOPs on `devices` devices at a fraction `mfu` of their dense peak, times `efficiency`."""
    return flops / (peak_tflops * 1e12 * mfu * devices * efficiency)


def cost_usd(seconds: float, devices: int, usd_per_device_hour: float) -> float:
    """Cost of `devices` devices for `seconds`."""
    return seconds / 3600 * devices * usd_per_device_hour


CHINCHILLA_TOKENS_PER_PARAMETER = 20.0


def chinchilla_multiple(parameters: float, tokens: float) -> float:
    """Tokens relative to the compute-optimal 20 per parameter (Hoffmann et al. 2022): 1 is compute-optimal."""
    return tokens / (CHINCHILLA_TOKENS_PER_PARAMETER * parameters)


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """L(N, D) = 1.69 + 406.4/N^0.34 + 410.7/D^0.28, nats per token (Hoffmann et al. 2022, approach 3).

    Fitted to MassiveText with a vocabulary of 32,000 and one epoch. On other data only differences are meaningful, roughly.
    """
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def lifetime_flops(parameters: float, train_tokens: float, served_tokens: float) -> float:
    """6·N·D for training plus 2·N per served token (Sardana & Frankle 2023)."""
    return 6 * parameters * train_tokens + 2 * parameters * served_tokens

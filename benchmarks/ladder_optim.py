"""Techniques of the ladder (`ladder.py`) that change the optimizer's options, the schedules or the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ladder_techniques import WARMUP_STEPS, Technique
from torch import nn
from torch.optim import Optimizer

from lit_llm.callbacks.learning_rate_schedules import DecayShape, wsd

Rate = Callable[[float, int], float]


def _rate(shape: DecayShape, *, tenths: int | None = None) -> Rate:
    """Return a schedule (t, total) -> factor that decays to zero after warmup, or in the last `tenths` tenths of the run."""

    def rate(t: float, total: int) -> float:
        steps = {"warmup_steps": min(WARMUP_STEPS, total // 5), "total_steps": total}
        decay_steps = None if tenths is None else total * tenths // 10
        return wsd(t, peak=1.0, final=0.0, **steps, decay_steps=decay_steps, shape=shape)

    return rate


def momentum_warmup(optimizer: Optimizer, t: float, total: int) -> None:
    """Set Muon's momentum, which rises from 0.85 to 0.95 over the first tenth of the steps."""
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = 0.85 + 0.1 * min(1.0, 10 * t / total)


def decay_to_zero(optimizer: Optimizer, t: float, total: int) -> None:
    """Set the weight decay to λ (1 − t/total). The optimizer multiplies it by the learning rate."""
    for group in optimizer.param_groups:
        group["weight_decay"] = group.setdefault("weight_decay_peak", group["weight_decay"]) * (1 - t / total)


def decay_as_rate(optimizer: Optimizer, t: float, total: int) -> None:
    """Set the weight decay to λ η/η_peak for the learning rate η, so that a step shrinks weights by the factor η² λ/η_peak."""
    for group in optimizer.param_groups:
        group["lr_peak"] = max(group.get("lr_peak", 0.0), group["lr"])
        decay = group.setdefault("weight_decay_peak", group["weight_decay"])
        group["weight_decay"] = decay * group["lr"] / group["lr_peak"]


def ratio(name: str, factor: float) -> Callable[[nn.Module, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return a function for `Technique.groups` that multiplies the rate 0.01 of the group `name` by `factor`. "head": the
    output head, which is split off from the group of the embeddings."""

    def groups(model: nn.Module, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lr = {"lr": 0.01 * factor}
        if name != "head":
            return [group | lr if group["name"] == name else group for group in found]
        head = model.head.weight
        found = [{**group, "params": [p for p in group["params"] if p is not head]} for group in found]
        return [*found, {"name": "head", "params": [head]} | lr]

    return groups


def half_the_batch_first(t: float, total: int) -> float:
    return 0.5 if t <= total / 3 else 1.0


def short_sequences_first(t: float, total: int) -> int:
    return 4 if t <= total / 6 else 2 if t <= total / 3 else 1


NANOCHAT, SPEEDRUN = "nanochat", "modded-nanogpt"

TECHNIQUES = [
    Technique("polar-express", "Amsel et al. 2025, arXiv 2505.16932", options={"ns_method": "polar_express"}),
    Technique("polar-express-4", "its first 4 steps", options={"ns_method": "polar_express", "ns_steps": 4}),
    Technique("polar-express-3", "its first 3 steps", options={"ns_method": "polar_express", "ns_steps": 3}),
    Technique("newton-schulz-3", "3 steps of Jordan et al. 2024 instead of 5", options={"ns_steps": 3}),
    Technique("normuon", "Li et al. 2025, arXiv 2510.05491; β2 0.95", options={"normuon_beta2": 0.95}),
    Technique("decay-to-zero", NANOCHAT, before_step=decay_to_zero),
    Technique("decay-as-rate", SPEEDRUN, before_step=decay_as_rate),
    Technique("no-decay", "weight decay 0", options={"weight_decay": 0.0}),
    Technique("momentum-warmup", SPEEDRUN + ": 0.85 to 0.95", before_step=momentum_warmup),
    Technique("momentum-0.9", "Muon's momentum 0.9", options={"momentum": 0.9}),
    Technique("muon-rate×1.4", "Muon's rate 0.014", options={"lr": 0.014}),
    Technique("rates×1.4", "both rates 0.014", options={"lr": 0.014, "adamw_lr": 0.014}),
    Technique("rates×2", "both rates 0.02", options={"lr": 0.02, "adamw_lr": 0.02}),
    Technique("embedding-rate×3", NANOCHAT + " has 10 times Muon's", groups=ratio("embedding", 3.0)),
    Technique("head-rate÷3", NANOCHAT + " has a fifth of Muon's", groups=ratio("head", 1 / 3)),
    Technique("vector-rate×3", "norm gains at 0.03", groups=ratio("vector", 3.0)),
    Technique("beta1-0.8", SPEEDRUN, options={"betas": (0.8, 0.95)}),
    Technique("cosine-to-zero", "final rate 0", rate=_rate("cosine")),
    Technique("linear-to-zero", "Bergsma et al. 2025, arXiv 2502.15938", rate=_rate("linear")),
    Technique("wsd-linear", SPEEDRUN + ": linear over the last 40 %", rate=_rate("linear", tenths=4)),
    Technique(
        "wsd-sqrt",
        "1 − √x over the last 40 %, Hägele et al. 2024, arXiv 2405.18392",
        rate=_rate("one_minus_sqrt", tenths=4),
    ),
    Technique("wsd-cosine", "cosine over the last 40 %", rate=_rate("cosine", tenths=4)),
    Technique("batch-warmup", "half the batch in the first third", rows=half_the_batch_first),
    Technique("length-warmup", "Li et al. 2021, arXiv 2108.06084: a quarter, then half", length=short_sequences_first),
]

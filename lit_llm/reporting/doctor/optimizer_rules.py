"""Rules about learning rates, updates and gradients."""

from __future__ import annotations

import itertools
import math
import statistics

from lit_llm.reporting.doctor.finding import advice, error, warning
from lit_llm.reporting.doctor.observed import Observed, Points

UPDATE_HIGH = 0.12
"""Update norm / weight norm, right after warmup, of the layer that a quarter of the layers exceed. Above: the rate is too high.

Healthy runs had up to 0.06, runs with ten times the rate at least 0.17 (docs/evidence/doctor.md)."""
PATH_LOW = 0.7
"""Sum over all steps of update norm / weight norm, of the same layer. Below it a run has hardly left its random weights.

Healthy runs had at least 2, runs with a thirtieth of the rate at most 0.35."""


def _upper(values: list[float]) -> float:
    """The value that a quarter of the values exceed: layers with few parameters, as norms, move less."""
    return sorted(values)[(3 * len(values)) // 4]


def _ratios_after_warmup(run: Observed) -> list[float]:
    """Update norm / weight norm of each layer in the first sampled step after warmup."""
    ready = max(run.warmup_steps, 2)
    layers = [next((v for step, v in points if step >= ready), None) for points in run.by_layer("update_ratio").values()]
    return [ratio for ratio in layers if ratio is not None]


@error(
    "parameters-not-trained",
    "parameters are frozen, or the optimizer does not have them",
    "remove requires_grad = False, or give the optimizer every parameter",
    "health/update_norm, setup/frozen, setup/unoptimized",
    "certain",  # an update of exactly zero
    explains=("dead-units", "learning-rate-too-low", "loss-stuck"),
)
def not_trained(run: Observed) -> str | None:
    missing = run.last("setup/unoptimized")
    if missing:
        return f"{missing:,.0f} parameters that require gradients are in no parameter group of the optimizer"
    if not run.from_scratch:
        return None
    frozen = run.last("setup/frozen")
    if frozen:
        return f"{frozen:,.0f} parameters do not require gradients, but training started from random weights"
    moved = run.by_layer("update_norm")
    rounds = run.setting("trainer.precision") == "bf16-true"  # then small updates are zero, too
    still = sorted(layer for layer, points in moved.items() if len(points) > 1 and all(value == 0 for _, value in points))
    if still and len(still) < len(moved) and not rounds:
        others = " and others" if len(still) > 4 else ""
        return f"no sampled step changed {', '.join(still[:4])}{others}, but it changed the other layers"
    return None


@error(
    "schedule-restarted",
    "the resumed run did not continue the schedule",
    "resume with the same schedule (--resume auto), and start a new run for a new one (--init_from)",
    "lr at the step of the resume",
    "certain",  # a schedule is a function of the step
    explains=("diverged", "loss-spikes"),
)
def restarted_schedule(run: Observed) -> str | None:
    rates = run.finite("lr")
    for first in run.first_steps:
        before = [rate for step, rate in rates if step <= first]
        # A restart repeats the beginning of the run. Two rows: one may be equal by chance.
        after = [(rate, _interpolated(rates, step - first)) for step, rate in rates if step > first][:4]
        repeats = [then is not None and abs(rate - then) <= 0.05 * then for rate, then in after]
        if first < 2 or not before or len(after) < 2 or not all(repeats):
            continue
        if max(abs(rate - before[-1]) for rate, _ in after) > 0.3 * before[-1]:
            return (
                f"the learning rate was {before[-1]:.3g} at step {first:,}, where the run was resumed, then {after[0][0]:.3g}, "
                "and went on as at the beginning of the run"
            )
    return None


@error(
    "updates-rounded-away",
    "weights in bf16 are too coarse for updates this small",
    "--trainer.precision bf16-mixed",
    "health/update_ratio",
    "likely",  # bf16 has 8 significant bits; Zamirai et al. 2020, Revisiting BFloat16 training
    explains=("learning-rate-too-low", "loss-stuck"),
)
def rounded_away(run: Observed) -> str | None:
    if run.setting("trainer.precision") != "bf16-true":
        return None
    ratios = _ratios_after_warmup(run)
    if ratios and statistics.median(ratios) < 2**-8:
        return (
            f"updates are {statistics.median(ratios):.3%} of the weights or less in half of the layers; bf16 rounds changes "
            "below 2^-9 = 0.2 % away"
        )
    return None


@error(
    "loss-scale",
    "the gradient is not that of the mean loss: micro-batches are added instead of averaged, or the loss is a sum",
    "divide the loss by the number of counted tokens of the global batch",
    "health/backward_loss_ratio, grad/norm",
    "certain",  # both are the same number in a step; Unsloth 2024, Bugs in gradient accumulation
    explains=("clipped-at-every-step", "diverged", "learning-rate-too-high", "loss-spikes"),
)
def wrong_scale(run: Observed) -> str | None:
    ratios = run.values("health/backward_loss_ratio", 0)
    if not ratios or run.setting("objective.weight"):  # distillation: a teacher's divergence is a part of the loss
        return None
    ratio = statistics.median(ratios)
    if ahead := run.median("train/loss_ahead"):  # is no part of the logged loss
        ratio /= 1 + run.setting("loss.ahead_weight", 0.0) * ahead / (run.median("train/loss") or math.inf)
    if not 0.8 < ratio < 1.25:
        return f"the loss that gradients are computed of is {ratio:.3g} times the logged mean per token"
    return None


@error(
    "learning-rate-too-high",
    "the learning rate is too high",
    "a tenth to a third of the learning rate (`find-lr` measures it)",
    "health/update_ratio, grad/norm, train/loss",
    "likely",
    explains=("diverged", "loss-spikes", "loss-not-finite", "loss-stuck", "dead-units", "large-logits"),
)
def rate_too_high(run: Observed) -> str | None:
    ratios = _ratios_after_warmup(run)
    if not ratios or _upper(ratios) < UPDATE_HIGH:
        return None
    ratio = _upper(ratios)
    return f"after warmup one step changed a quarter of the layers by {ratio:.0%} of their norm or more (usual: at most 6 %)"


@warning(
    "learning-rate-too-low",
    "the learning rate is too low",
    "ten times the learning rate (`find-lr` measures it)",
    "health/update_ratio, train/loss",
    "likely",
    explains=("loss-stuck",),
)
def rate_too_low(run: Observed) -> str | None:
    planned = run.planned_steps
    if not run.from_scratch or run.step < run.warmup_steps + 100 or planned is None or 2 * run.step < planned:
        return None
    paths = [statistics.mean(v for _, v in points) * run.step for points in run.by_layer("update_ratio").values() if points]
    if not paths or not 0 < _upper(paths) < PATH_LOW:
        return None
    return (
        f"all {run.step:,} updates together, were they in one direction, would have changed three quarters of the layers by "
        f"{_upper(paths):.0%} of their norm or less"
    )


@warning(
    "clipped-at-every-step",
    "the limit of the gradient norm is far below the usual norm",
    "--gradient_norm.clip 1.0, or the median of grad/norm",
    "grad/norm, grad/clip_fraction",
    "certain",  # a limit that always acts is a normalisation, and hides spikes
)
def clipped_always(run: Observed) -> str | None:
    clip = run.setting("gradient_norm.init_args.clip")
    fractions, norm = run.values("grad/clip_fraction", run.warmup_steps), run.median("grad/norm", run.warmup_steps)
    after = run.median("grad/norm_clipped", run.warmup_steps)
    if not fractions or norm is None or not after:
        return None
    share = statistics.mean(fractions)
    if share > 0.95 and norm > 20 * after:
        said = f" of {clip}" if clip is not None else ""
        return (
            f"{share:.0%} of the steps are clipped, and the median norm {norm:.3g} is {norm / after:.0f} times the limit{said}"
        )
    return None


@warning(
    "decayed-vectors",
    "weight decay acts on norm weights and biases",
    "put parameters of one dimension into a group with weight_decay 0",
    "setup/decayed_vectors",
    "certain",  # the groups of GPT-3 and LLaMA training code
)
def decayed_vectors(run: Observed) -> str | None:
    count = run.last("setup/decayed_vectors")
    return None if not count else f"{count:,.0f} norm weights or biases are in a parameter group with weight decay"


@advice(
    "no-warmup",
    "the first steps use the full learning rate, when the optimizer's averages know one batch only",
    "--schedule.warmup_steps 100, or 1 % of the steps",
    "lr, grad/norm of the first steps",
    "certain",  # Goyal et al. 2017; Liu et al. 2020, On the variance of the adaptive learning rate
)
def no_warmup(run: Observed) -> str | None:
    rates = run.finite("lr")
    if not rates or rates[0][0] > 1 or not run.from_scratch or run.step < 20 or (run.planned_steps or 0) < 100:
        return None
    highest = max(rate for _, rate in rates)
    if highest > 0 and rates[0][1] >= 0.9 * highest:
        return f"the learning rate starts at {rates[0][1]:.3g}, its highest value, at step 1"
    return None


@advice(
    "beta2-too-long",
    "Adam's average of squares never forgets the first gradients",
    "--optimizer.betas '[0.9, 0.95]'",
    "the optimizer's betas",
    "certain",  # an average with beta2 reaches back 1/(1 - beta2) steps; Kingma and Ba 2015
)
def long_memory(run: Observed) -> str | None:
    betas = run.setting("optimizer.init_args.betas")
    if not isinstance(betas, list | tuple) or len(betas) != 2 or not isinstance(betas[1], int | float) or not 0 < betas[1] < 1:
        return None
    memory, planned = 1 / (1 - betas[1]), run.planned_steps
    if planned is not None and planned >= 100 and memory > 10 * planned:
        return f"beta2 {betas[1]:g} averages over {memory:,.0f} steps, but the run has {planned:,}"
    return None


def _interpolated(rates: Points, step: int) -> float | None:
    """The rate at a step between two rows."""
    for (left, low), (right, high) in itertools.pairwise(rates):
        if left <= step <= right:
            return low + (high - low) * (step - left) / (right - left)
    return None

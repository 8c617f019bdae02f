"""Rules of `doctor` about learning rates, updates and gradients."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

from lit_llm.reporting.doctor.finding import JUDGED, ROUGH, SLOW, UNSTABLE, advice, error, warning
from lit_llm.reporting.doctor.observed import Observed, Unjudged, medians

TUNED_HIGH = 0.08
"""Limit for runs from trained weights of the ratio update norm / weight norm until right after warmup. The ratio is the upper
quartile over the layers.

Healthy fine-tuning had up to 0.05; fine-tuning with thirty times the learning rate had 0.096."""
ADAPTED_HIGH = 0.12
"""`TUNED_HIGH` (limit of update norm / weight norm) for adapters, whose weights begin small. Healthy runs had up to 0.08."""
GROWTH_HIGH = 0.16
"""Limit for runs from random weights of (update norm / weight norm) times the growth of the weight norm until shortly after
warmup, both as upper quartiles over the layers. A large step does no harm if the weights do not grow by it.

Healthy runs had up to 0.113; with ten times the learning rate they had at least 0.198 (docs/evidence/doctor.md)."""
GAIN_HIGH = 0.35
"""Limit of the product of weight growth and `setup/initial_gain`, below which weights are still small and `GROWTH_HIGH` does
not apply: the weights of a narrow model begin far below 1 / √width.

At widths 16 and 32, runs with the best learning rate had up to 0.26, runs with ten times this rate at least 0.377."""
PATH_LOW = 0.5
"""Limit of the sum over all steps of update norm / weight norm (`_path`), below which a run has hardly left its random weights.

Healthy runs had at least 2; runs with a thirtieth of the learning rate had at most 0.35."""


TUNING_LOW = 0.005
"""`PATH_LOW` for a run from trained weights, which change little: AdamW with a rate of 1e-5 reaches 0.01 in 20 steps."""
ADAPTERS_LOW = 0.25
"""`PATH_LOW` for adapters, half of which begin at zero. Healthy runs had at least 0.70; runs with the rate of full fine-tuning
had 0.10."""
PREFERENCES_HIGH = 0.3
"""Limit of `_path` for preference tuning without adapters. Healthy runs had up to 0.2; with thirty times the rate: 0.57."""
LEARNS = 0.3
"""A run from random weights with `Observed.behind_pairs` (0: the loss of counted pairs of tokens, 1: of single tokens) below
LEARNS learns, so that its learning rate is not called too low. Runs with ten times the best rate had at least 0.39."""


def _upper(values: list[float]) -> float:
    """Return the upper quartile of `values`. A median would be too low, because layers with few parameters change less."""
    return sorted(values)[(3 * len(values)) // 4]


def _ratios_of_warmup(run: Observed, chosen: Callable[[list[float]], float]) -> list[float]:
    """Return for each layer one of its ratios update norm / weight norm in the warmup.

    Args:
        chosen: function from the layer's ratios, from step 2 to the first logged step after warmup, to one of these ratios.

    Raises:
        Unjudged: No layer has a row in the warmup.
    """
    ready, layer_ratios = max(run.warmup_steps, 2), []
    for points in run.by_layer("update_ratio", least=2).values():
        last = next((step for step, _ in points if step >= ready), ready)
        if ratios := [value for step, value in points if 1 < step <= last]:
            layer_ratios.append(chosen(ratios))
    if not layer_ratios:
        raise Unjudged("health/update_ratio/LAYER")
    return layer_ratios


@error.certain(  # an update of exactly zero
    "parameters are frozen, detached from the loss, or all zero where they multiply, or the optimizer does not have them",
    "remove requires_grad = False; give the optimizer every parameter; start one factor of a product at random",
    "health/update_norm, setup/frozen, setup/unoptimized",
    explains=SLOW,
)
def parameters_not_trained(run: Observed) -> str | None:
    if missing := run.last("setup/unoptimized"):
        return f"{missing:,.0f} parameters that require gradients are in no parameter group of the optimizer"
    frozen = run.last("setup/frozen")
    if frozen and run.from_scratch:
        return f"{frozen:,.0f} parameters do not require gradients, but training started from random weights"
    rounds = run.setting("trainer.precision") == "bf16-true"  # rounding makes small updates zero, too
    ratios = [value for points in run.by_layer("update_ratio").values() for _, value in points if value]
    tiny = bool(ratios) and statistics.median(ratios) < 1e-4  # float32 rounds updates of norm weights away
    still = sorted(
        layer
        for group in (("gradient_norm",) if tiny else ("gradient_norm", "update_norm"))
        for layer, points in run.by_layer(group).items()
        if len(points) > 2 and not any(value for _, value in points)
    )
    skips = sum(run.values("spike/skipped"))  # a skipped step changes no layer
    if not still or rounds or skips or not any(run.values("lr")):
        return None
    others = " and others" if len(still) > 4 else ""
    return f"no sampled step changed {', '.join(list(dict.fromkeys(still))[:4])}{others}, or gave it a gradient"


@error.likely(
    "the spike guard skips steps that are not spikes",
    "a larger --spike_guard.sigma, such as 20; --spike_guard null",
    "spike/skipped",
    explains=(*SLOW, "parameters-not-trained", "loss-spikes"),
)
def guard_too_strict(run: Observed) -> str | None:
    skipped = sum(run.values("spike/skipped"))
    if skipped < max(20, 0.2 * run.step):
        return None
    return f"{skipped:.0f} of {run.step:,} steps were skipped by the spike guard"


@error.likely(  # bf16 has 8 significant bits; Zamirai et al. 2020, Revisiting BFloat16 training
    "weights in bf16 are too coarse for updates this small",
    "--trainer.precision bf16-mixed",
    "health/update_ratio",
    explains=SLOW,
)
def updates_rounded_away(run: Observed) -> str | None:
    if run.setting("trainer.precision") != "bf16-true":
        return None
    ratios = _ratios_of_warmup(run, lambda ratios: ratios[-1])
    if statistics.median(ratios) < 2**-8:
        return (
            f"updates are {statistics.median(ratios):.3%} of the weights or less in half of the layers; bf16 rounds changes "
            "below 2^-9 = 0.2 % away"
        )
    return None


@error.likely(  # both are the same number in a step; Unsloth 2024, Bugs in gradient accumulation
    "the gradient is not that of the mean loss: micro-batches are added instead of averaged, the loss is a sum, or a part of "
    "it, such as a rank's, is lost",
    "divide the loss by the number of counted tokens of the global batch",
    "health/backward_loss_ratio, grad/norm",
    explains=ROUGH,
)
def loss_scale(run: Observed) -> str | None:
    if run.setting("objective.init_args.weight"):  # distillation: a teacher's divergence is a part of the loss
        return None
    ratios = run.values("health/backward_loss_ratio", least=3)
    ratio, spread = statistics.median(ratios), max(ratios) - min(ratios)
    if ahead := run.median("train/loss_ahead", default=0.0):  # is no part of the logged loss
        ratio /= 1 + (run.number("loss.ahead_weight") or 0.0) * ahead / (run.median("train/loss", default=0.0) or math.inf)
    if 0.8 < ratio < 1.25 or spread > 0.03 * ratio:  # a further loss, such as label smoothing, is no fixed factor
        return None
    return f"the loss that gradients are computed of is {ratio:.3g} times the logged mean per token"


@error.likely(
    "the learning rate is too high, or other updates are too large, such as those of an optimizer with damaged averages",
    "a tenth to a third of the learning rate (`find-lr` measures it)",
    "health/update_ratio, grad/norm, train/loss",
    explains=(
        *UNSTABLE,
        *JUDGED,
        *("loss-stuck", "under-fitting", "dead-units", "gradients-vanish", "preference-leak", "likelihoods-fall"),
    ),
)
def learning_rate_too_high(run: Observed) -> str | None:
    preferences = run.points("train/margin") and run.setting("lora") is None
    if preferences and (path := _path(run)) > max(PREFERENCES_HIGH, 1e-3 * run.step):
        return f"all updates together, were they in one direction, would have changed a quarter of the layers by {path:.0%}"
    ratio = _upper(_ratios_of_warmup(run, max))
    if not run.from_scratch:
        said = f"one step changed a quarter of the layers by {ratio:.0%} of their norm or more (usual: at most 6 %)"
        return said if ratio >= (TUNED_HIGH if run.setting("lora") is None else ADAPTED_HIGH) else None
    growth = _upper(_growths(run) or [1.0])
    if growth * ratio < GROWTH_HIGH or growth * run.last("setup/initial_gain", 1.0) < GAIN_HIGH:
        return None
    return (
        f"until shortly after warmup a quarter of the layers grew to {growth:.2g} times their norm or more (usual: 1.9), and "
        f"one step changed a quarter of them by {ratio:.0%} or more (usual: 6 %):"
        f" {growth * ratio:.2g} as a product (usual: at most 0.11)"
    )


def _growths(run: Observed) -> list[float]:
    """Return each layer's largest weight norm within twice the warmup's steps (at most 200), divided by its norm at step 1.

    Layers with a norm of zero at step 1 are left out."""
    last, layers = min(200, 2 * max(run.warmup_steps, 2)), run.by_layer("weight_norm").values()
    known = [points for points in layers if points and points[0][0] <= 1 and points[0][1] > 0]
    return [max(norm for step, norm in points if step <= last) / points[0][1] for points in known]


@warning.likely(
    "the learning rate is too low",
    "ten times the learning rate (`find-lr` measures it)",
    "health/update_ratio, train/loss",
    explains=("loss-stuck", "under-fitting"),
)
def learning_rate_too_low(run: Observed) -> str | None:
    adapters = run.setting("lora") is not None
    planned, lowest = run.planned_steps, PATH_LOW if run.from_scratch else ADAPTERS_LOW if adapters else TUNING_LOW
    if not run.config or run.points("train/margin") or planned is None or run.step < max(run.warmup_steps + 100, planned / 2):
        return None
    path = _path(run)
    if not 0 < path < lowest or (run.from_scratch and (run.behind_pairs or 1.0) < LEARNS):
        return None
    return (
        f"all {run.step:,} updates together, were they in one direction, would have changed three quarters of the layers by "
        f"{path:.1%} of their norm or less"
    )


def _path(run: Observed) -> float:
    """Return how far weights moved: the upper quartile over layers of the sum over all steps of update norm / weight norm.

    A row's ratio is used for all steps since the previous row, and the last row's ratio also for the steps after it.

    Raises:
        Unjudged: There are no rows.
    """
    paths = []
    for points in run.by_layer("update_ratio", least=1).values():
        steps = [0, *(step for step, _ in points)]
        path = sum(value * (later - step) for (later, value), step in zip(points, steps, strict=False))
        paths.append(path + (points[-1][1] * (run.step - points[-1][0]) if points else 0.0))
    return _upper(paths)


@warning.likely(  # a limit that always acts does no harm by itself: many healthy runs have one
    "the learning rate is too high: the norm stays at the limit, and the loss does not fall or updates are large",
    "a tenth to a third of the learning rate (`find-lr` measures it)",
    "grad/norm, grad/clip_fraction, health/update_ratio, train/loss",
    explains=("under-fitting",),
)
def clipped_at_every_step(run: Observed) -> str | None:
    share = statistics.mean(run.values("grad/clip_fraction", run.warmup_steps, least=1))
    if share <= 0.95:
        return None
    said = f"{share:.0%} of the steps are clipped (the median norm is {run.median('grad/norm', run.warmup_steps):.3g})"
    if learning_rate_too_high.applies(run):
        return f"{said}, and updates are large"
    first, last = medians(run.values("train/loss", run.warmup_steps, least=20), 2)
    if not run.learns_text or last < 0.99 * first or learning_rate_too_low.applies(run):
        return None
    return f"{said}, and the loss does not fall: {first:.3f}, then {last:.3f} (medians of halves)"


@warning.possible(
    "training becomes unstable: the learning rate is too high for the weights that it has made",
    "a third of the learning rate",
    "grad/norm, health/gradient_norm, health/weight_norm, train/loss",
    explains=("loss-spikes",),
)
def gradient_norm_rises(run: Observed) -> str | None:
    """Return a sentence if the gradient norm rises in the last three fifths of a run. Before, it rises in healthy runs too."""
    *_, middle, later, last = medians(run.values("grad/norm", least=20), 5)
    if last < 3 * middle or not middle < later < last:  # healthy runs: up to 2.1 times
        return None
    return (
        f"the gradient norm rose from {middle:.3g} to {later:.3g} and {last:.3g} in the last three fifths of the run (medians)"
    )


@warning.certain(  # the groups of GPT-3 and LLaMA training code
    "weight decay acts on norm weights and biases",
    "put parameters of one dimension into a group with weight_decay 0",
    "setup/decayed_vectors",
)
def decayed_vectors(run: Observed) -> str | None:
    count = run.last("setup/decayed_vectors")
    decay = run.last("setup/weight_decay", 0.0)
    if not count or decay <= 0.02:  # torch's AdamW decays everything by 0.01, which does no harm
        return None
    return f"{count:,.0f} norm weights or biases are in a parameter group with weight decay"


@warning.likely(
    "the warm-up is longer than the run, or most of it",
    "--schedule.warmup_steps: 1 to 10 % of the steps",
    "lr",
    explains=SLOW,
)
def warmup_too_long(run: Observed) -> str | None:
    planned = run.planned_steps
    if planned is None or run.step < max(50, planned // 2):
        return None
    rates = run.finite("lr", least=8)
    if planned >= 100 and run.warmup_steps > 0.6 * planned:
        return f"the learning rate came near its highest value at step {run.warmup_steps:,} of {planned:,}"
    middle = rates[len(rates) // 2][1]
    if rates[-1][1] < 1.3 * middle or rates[-1][1] < max(rate for _, rate in rates):
        return None
    return (
        f"the learning rate still rises at step {run.step:,} of {planned:,}: {middle:.3g} at half of it, {rates[-1][1]:.3g} now"
    )


@warning.likely(
    "the learning rate is near zero, or at its last value, long before the run ends: the schedule counts other steps",
    "--schedule.total_steps: the steps of the run",
    "lr",
    explains=SLOW,
)
def schedule_ends_early(run: Observed) -> str | None:
    rates = run.finite("lr", least=1)
    highest, last = max(rate for _, rate in rates), rates[-1][0]
    end = next((step for step, rate in reversed(rates) if rate > 0.01 * highest), 0)
    if last < 50 or not highest:
        return None
    final = rates[-1][1]
    flat = next((step for step, rate in reversed(rates) if abs(rate - final) > 0.01 * final), last)
    if 0 < final < 0.7 * highest and last - flat > 0.4 * last and run.is_complete:
        return f"the learning rate has been {final:.3g} since step {flat:,} of {last:,}, after {highest:.3g}"
    low = [step for step, _ in rates if step > end]  # two rows may be the ends of two schedules, after a resume
    if len(low) < 3 or last - low[0] < 0.2 * last:
        return None
    return f"the learning rate is below 1 % of its highest value since step {low[0]:,} of {last:,}"


@warning.likely(
    "the learning rate jumps up, or rises again after it has fallen: the schedule has cycles, or starts anew",
    "one schedule over all steps (--schedule.total_steps)",
    "lr",
    explains=(*ROUGH, "warmup-too-long"),
)
def rate_rises_again(run: Observed) -> str | None:
    rates = run.finite("lr", least=6)
    for (_, before), (step, rate) in itertools.pairwise(rates[4:]):  # linear warmup: at most 6/5 from the fifth row on
        if rate > 1.5 * before > 0:
            return f"the learning rate went from {before:.3g} to {rate:.3g} at step {step:,}"
    lowest = math.inf
    for step, rate in rates:
        if step > run.warmup_steps and rate > 1.5 * lowest and lowest > 0:
            return f"the learning rate was {lowest:.3g} after warmup, and is {rate:.3g} at step {step:,}"
        lowest = min(lowest, rate) if step >= run.warmup_steps else lowest
    return None


@warning.likely(
    "weight decay pulls the weights to zero faster than they learn",
    "a third of --optimizer.weight_decay",
    "setup/weight_decay, health/weight_norm",
    explains=(*SLOW, "diverged"),
)
def weight_decay_too_high(run: Observed) -> str | None:
    decay, norms = run.last("setup/weight_decay", 0.0), run.total("weight_norm", least=1)
    if decay > 0.5:
        return f"weight decay is {decay:g} (usual: 0 to 0.3)"
    if run.from_scratch and len(norms) > 2 and norms[-1][1] < 0.5 * norms[0][1]:
        return f"the norm of all weights shrank from {norms[0][1]:.3g} to {norms[-1][1]:.3g}"
    return None


@advice.likely(  # Goyal et al. 2017; Liu et al. 2020, On the variance of the adaptive learning rate
    "the first steps use the full learning rate, when the optimizer's averages know one batch only",
    "--schedule.warmup_steps 100, or 1 % of the steps",
    "lr, grad/norm of the first steps",
)
def no_warmup(run: Observed) -> str | None:
    rates = run.finite("lr", least=1)
    if rates[0][0] > 1 or not run.from_scratch or run.step < 20 or (run.planned_steps or 0) < 100:
        return None
    highest = max(rate for _, rate in rates)
    if highest > 0 and rates[0][1] >= 0.9 * highest:
        return f"the learning rate starts at {rates[0][1]:.3g}, its highest value, at step 1"
    return None


@advice.likely(  # McCandlish et al. 2018: the noise scale of language models is thousands of tokens even early in training
    "a step has few tokens, so that its gradient is mostly noise",
    "a larger --data.global_batch_size",
    "progress/tokens, grad/norm",
)
def batch_small(run: Observed) -> str | None:
    tokens = run.tokens_per_step
    if tokens is None or not run.from_scratch or run.step < 50:
        return None
    return f"a step has {tokens:.0f} tokens" if tokens < 256 else None

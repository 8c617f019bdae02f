"""Rules of `doctor` about layers, ranks and time."""

from __future__ import annotations

import statistics
from collections import Counter

from lit_llm.reporting.doctor.finding import ROUGH, SLOW, UNSTABLE, error, warning
from lit_llm.reporting.doctor.observed import Observed, Unjudged


@error.certain(  # logits behind a changed input must change
    "no position sees another one that is a quarter of the sequence before it: attention is off, or sees too little",
    "look at the attention mask, the window and the projections",
    "health/context_use",
    explains=(*SLOW, "parameters-not-trained"),
)
def no_context(run: Observed) -> str | None:
    if any(run.setting(f"model.{key}") for key in ("mask_documents", "window", "layers.window")):
        return None  # by these settings, attention sees less than the whole sequence
    values = run.values("health/context_use", least=2)
    return None if max(values) > 0 else "other inputs in three quarters of a sequence did not change its last logits at all"


@error.likely(  # Micikevicius et al. 2018, Mixed precision training
    "most gradients are exactly zero: they underflow for lack of a loss scale, or are masked",
    "--trainer.precision bf16-mixed; scale the loss in fp16",
    "health/zero_gradients",
    explains=(*SLOW, *UNSTABLE, "parameters-not-trained"),
)
def gradients_vanish(run: Observed) -> str | None:
    if run.setting("model.moe"):  # experts without tokens have zero gradients
        return None
    without = {step for step, share in run.finite("health/ignored_targets") if share == 1}  # no target, no gradient
    shares = [share for step, share in run.finite("health/zero_gradients") if step > 1 and step not in without]
    if not shares:
        raise Unjudged("health/zero_gradients")
    if (share := statistics.median(shares)) < 0.5:
        return None
    if not any(norm for step, norm in run.total("gradient_norm") if step > 1):  # nothing is trained
        return None
    return f"{share:.0%} of the gradients of matrices are exactly 0"


@error.certain(  # DDP keeps the weights of all ranks equal, bit for bit
    "a rank has other weights than the others, so that averaged gradients fit none of them",
    "start every rank from the same checkpoint and seed; look for code that runs on one rank only",
    "health/rank_difference",
    explains=ROUGH,
)
def ranks_differ(run: Observed) -> str | None:
    if run.last("setup/ranks", 1.0) < 2:
        return None
    step, largest = max(run.finite("health/rank_difference", least=1), key=lambda point: point[1])
    return f"the weights of the ranks differ by {largest:.2g} (relative) at step {step:,}" if largest > 0 else None


@warning.likely(  # Lu et al. 2019, Dying ReLU and initialization
    "units of the MLP never are above zero, and so get no gradient",
    "a lower learning rate, a smaller initial bias, or --model.mlp swiglu",
    "health/dead_units",
    explains=(*SLOW, "large-logits", "gradients-vanish", "parameters-not-trained"),
)
def dead_units(run: Observed) -> str | None:
    last_points = {layer: points[-1] for layer, points in run.by_layer("dead_units", least=2).items() if points}
    layer, (step, share) = max(last_points.items(), key=lambda last: last[1][1])
    if share <= 0.7:  # Lion, healthy: 0.64
        return None
    return f"{share:.0%} of the hidden units of {layer} were zero on every probed token at step {step:,}"


@warning.possible(  # Chowdhery et al. 2022, PaLM, 5.1; Wortsman et al. 2023, Small-scale proxies
    "logits drift upwards, which ends in spikes",
    "a lower learning rate; a larger --loss.z_loss, from 1e-4 on",
    "health/logit_max, health/logit_rms",
)
def large_logits(run: Observed) -> str | None:
    step, largest = run.finite("health/logit_max", least=2)[-1]
    return f"the largest logit grew to {largest:.0f} at step {step:,}" if largest > 100 else None


@warning.likely(  # the time that steps wait for data
    "the data loader is slower than the model",
    "more --data.num_workers; prepare the text once (`prepare`); a local disk",
    "time/data_fraction",
)
def slow_loader(run: Observed) -> str | None:
    shares = run.values("time/data_fraction", least=3)
    # Healthy runs: at most 0.04; with steps of 15 ms on a busy machine up to 0.19, and up to 0.34 in one row.
    speed = run.median("throughput/tokens_per_second", default=0.0)
    most = 0.22 if speed and (run.tokens_per_step or 0.0) / speed < 0.1 else 0.12
    mean = statistics.mean(shares)
    waits = mean > most or (mean > 0.12 and max(shares) > 0.5)
    return f"steps wait for data in {mean:.0%} of the time (mean of {len(shares):,} rows)" if waits else None


@warning.likely(
    "one rank is slower than the others, and all wait for it",
    "look at that machine: clock rate, temperature, other processes",
    "rank/straggler, rank/step_time_max, rank/step_time_mean",
)
def straggler(run: Observed) -> str | None:
    if run.last("setup/ranks", 1.0) < 2:
        return None
    slowest = run.values("rank/straggler", least=4)
    longest, mean = run.median("rank/step_time_max"), run.median("rank/step_time_mean")
    rank, times = Counter(slowest).most_common(1)[0]
    if times > 0.7 * len(slowest) and longest > 1.2 * mean > 0:
        return (
            f"rank {rank:.0f} was the slowest in {times} of {len(slowest)} rows, with {longest / mean:.2f} times the mean work"
        )
    return None

"""Rules about layers, ranks and time."""

from __future__ import annotations

import statistics
from collections import Counter

from lit_llm.reporting.doctor.finding import ROUGH, SLOW, error, warning
from lit_llm.reporting.doctor.observed import Observed


@error.certain(  # DDP keeps the weights of all ranks equal, bit for bit
    "a rank has other weights than the others, so that averaged gradients fit none of them",
    "start every rank from the same checkpoint and seed; look for code that runs on one rank only",
    "health/rank_difference",
    explains=ROUGH,
)
def ranks_differ(run: Observed) -> str | None:
    if run.last("setup/ranks", 1.0) < 2:
        return None
    largest = max(run.finite("health/rank_difference", least=1), key=lambda point: point[1])
    if largest[1] > 0:
        return f"the weights of the ranks differ by {largest[1]:.2g} (relative) at step {largest[0]:,}"
    return None


@error.likely(  # units that are zero on every token get no gradient
    "the units of an MLP are dead from the first step on: its matrices all start at zero, or a bias far below zero",
    "start all matrices but the last one of a block at random",
    "health/dead_units of step 1",
    explains=(*SLOW, "dead-units", "gradients-vanish", "parameters-not-trained", "no-context"),
)
def dead_from_start(run: Observed) -> str | None:
    first = {layer: points[0] for layer, points in run.by_layer("dead_units", least=2).items() if points}
    found = [layer for layer, (step, share) in first.items() if step <= 1 and share > 0.95]
    if not found or not run.from_scratch:
        return None
    return f"the hidden units of {', '.join(found[:4])} were zero on every probed token of step 1"


@warning.likely(  # Lu et al. 2019, Dying ReLU and initialization
    "units of the MLP never are above zero, and so get no gradient",
    "a lower learning rate, a smaller initial bias, or --model.mlp swiglu",
    "health/dead_units",
    explains=(*SLOW, "large-logits", "gradients-vanish", "parameters-not-trained"),
)
def dead_units(run: Observed) -> str | None:
    found = {layer: points[-1] for layer, points in run.by_layer("dead_units", least=2).items() if points}
    worst = max(found, key=lambda layer: found[layer][1])
    if found[worst][1] <= 0.7:  # Lion, healthy: 0.64
        return None
    step, share = found[worst]
    return f"{share:.0%} of the hidden units of {worst} were zero on every probed token at step {step:,}"


@warning.possible(  # Chowdhery et al. 2022, PaLM, 5.1; Wortsman et al. 2023, Small-scale proxies
    "logits drift upwards, which ends in spikes",
    "a lower learning rate; a larger --loss.z_loss, from 1e-4 on",
    "health/logit_max, health/logit_rms",
)
def large_logits(run: Observed) -> str | None:
    points = run.finite("health/logit_max", least=2)
    if points[-1][1] > 100:
        return f"the largest logit grew to {points[-1][1]:.0f} at step {points[-1][0]:,}"
    return None


@warning.likely(  # the time that steps wait for data
    "the data loader is slower than the model",
    "more --data.num_workers; prepare the text once (`prepare`); a local disk",
    "time/data_fraction",
)
def slow_loader(run: Observed) -> str | None:
    shares = run.values("time/data_fraction", least=3)
    # Healthy runs: at most 0.04; of steps of 15 ms on a busy machine up to 0.19, and 0.34 in a row.
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

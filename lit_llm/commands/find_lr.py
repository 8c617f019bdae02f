"""`python -m lit_llm find-lr`: searches the peak learning rate of a recipe by short runs, and writes an overlay with the rate.

A sweep of each rate of the optimizer, from 1e-6 to 10, finds where training breaks. Below that rate, short runs with the
recipe's schedule, compressed, compare rates by factors of two. The suggested rate is the minimum of a parabola through the best
three, times a factor for the length of the run: the best rate is proportional to tokens^-0.32, except from trained weights.
The command trains on one device, and writes only the overlay and the page: no run folder, no checkpoint, no log.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

from lit_llm.commands.launch import launch
from lit_llm.commands.new_output import REPLACE_HELP, new_file, new_file_if
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import Arguments
from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import STEPS, whole
from lit_llm.training.rate_search import (
    FoundRates,
    Sweep,
    has_diverged,
    horizon_factor,
    lowest,
    search,
    swept_rates,
    vertex,
    without_batches,
)

if TYPE_CHECKING:
    from lit_llm.commands.short_runs import ShortRuns

LOW, HIGH = 1e-6, 10.0
"""The lowest and the highest rate of a sweep. The recipe's own rate, which may be wrong, has no influence."""
LEAST_PROBE = 50
"""Least number of steps of a short run. A longer run gets short runs of a tenth of its steps."""
_TAIL = 0.2
"""Share of a short run's steps, at its end, over which the losses are averaged: the mean is the loss of the run."""


def _own_flags() -> OwnFlags:
    flags = OwnFlags("find-lr")
    add = flags.add_argument
    add("--out", type=Path, help="The overlay with the suggested rates (required).")
    add("--html", type=Path, help="A page with pictures of the sweeps and the short runs.")
    add("--seeds", range=whole(1, 100), default=3, help="Repeat the comparison with other weights and data.")
    add("--sweep_steps", range=whole(20, 10**6), default=100, help="Steps of the sweep of a rate.")
    add("--probe_steps", range=whole(5, STEPS), help="Steps of a short run. Default: a tenth of the run, at least 50.")
    add("--replace", type=bool, help=REPLACE_HELP)
    return flags


def main(words: list[str]) -> int:
    """Search the rates, print them, write the overlay and the page, and return the exit code."""
    flags = _own_flags()
    own, rest = flags.split(words)
    if own.out is None:
        flags.problems.append("find-lr needs a file for the overlay (--out overlay.yaml)")
    return launch("fit", rest, lambda arguments: _run(own, arguments), own=flags)


def _run(own: argparse.Namespace, arguments: Arguments) -> int:
    from lit_llm.commands.short_runs import ShortRuns, overlay_text
    from lit_llm.core.disk import write_text
    from lit_llm.reporting.rate_page import rate_page

    html = new_file_if(own.html, replace=own.replace, flag="--html")
    with new_file(own.out, replace=own.replace) as overlay, html as page:
        runs, say = ShortRuns(arguments), partial(print, flush=True)
        if runs.devices > 1:
            say(f"find-lr trains on one device, with the whole batch of the recipe's {runs.devices}")
        advice = find_rates(runs, seeds=own.seeds, sweep_steps=own.sweep_steps, probe_steps=own.probe_steps, say=say)
        write_text(overlay, overlay_text({"optimizer": {"init_args": advice.rates}}, own.command))
        if page is not None:
            write_text(page, rate_page(advice, "Learning rates", own.command))
    if advice.factor != 1:
        print(f"rates of short runs of {advice.probe_steps} steps, times {advice.factor:.2f} because the run is longer:")
    elif advice.probe_steps < runs.steps:
        unknown = "; not measured for adapters" if runs.has_adapters else ""
        print(f"rates of short runs of {advice.probe_steps} steps, as they are: the run starts from trained weights{unknown}:")
    for key, rate in advice.rates.items():
        each = advice.by_seed[key]
        spread = f", {min(each):.2g} to {max(each):.2g} over {len(each)} seeds" if len(each) > 1 else ""
        print(f"{key}: {rate:g} (recipe: {advice.recipe[key]:g}{spread})")
    print(f"cost: {advice.steps:,} steps, {advice.steps / runs.steps:.1f} times the run's {runs.steps:,}")
    print(f"Wrote {own.out}. Use it: fit --config RECIPE --config {own.out}")
    return 0


def tail_loss(losses: list[float], steps: int) -> float:
    """Return the mean of the last fifth of a run's `losses`; infinity if it is not finite, or the run ended before `steps`."""
    if len(losses) < steps:
        return math.inf
    last = losses[-max(1, round(_TAIL * steps)) :]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


def find_rates(
    runs: ShortRuns, *, seeds: int, sweep_steps: int, probe_steps: int | None, say: Callable[[str], None] = lambda text: None
) -> FoundRates:
    """Sweep each of the optimizer's rates once, then search the best value of each by short runs. Return the best rates.

    From each loss of a sweep, the loss of the same batch with the weights at the start is subtracted. Otherwise, a hard batch
    would look like divergence if training gains little, for example from trained weights.

    The first seed finds the best power of two; further seeds compare it with its two neighbours, with other weights and other
    data. A seed suggests the minimum of a parabola, times `horizon_factor` from a short run to the whole run, which is 1 if the
    run starts from trained weights. The result is the geometric mean of the seeds' suggestions.

    Args:
        probe_steps: steps of a short run. None: a tenth of the run, at least `LEAST_PROBE`.
        say: prints a line about each measurement.

    Raises:
        UserError: The run is too short for a sweep, or no short run has a finite loss.
    """
    if runs.steps < 2:
        raise UserError("the run has one step, but a sweep needs several (--trainer.max_steps)")
    keys = list(runs.rates)
    probe_steps = runs.tenth(LEAST_PROBE) if probe_steps is None else min(probe_steps, runs.steps)
    factor = 1.0 if runs.from_weights else horizon_factor(probe_steps, runs.steps)
    sweeps: dict[str, Sweep] = {}
    swept = swept_rates(LOW, HIGH, min(sweep_steps, runs.steps))
    at_first = runs.observe(len(swept), [], seed=0, frozen_after=0)
    say(f"first weights: {len(at_first)} steps, mean loss {sum(at_first) / len(at_first):.4f}")
    for key in keys:
        observed = runs.sweep(key, swept, lambda each: has_diverged(without_batches(each, at_first)), seed=0)
        sweeps[key] = Sweep(swept, without_batches(observed, at_first))
        say(f"sweep {key}: {len(sweeps[key].losses)} steps, loss lowest at {sweeps[key].edge:.2g}")
    origin = {key: sweeps[key].start for key in keys}  # the rate of exponent 0
    probes: dict[str, list[dict[float, float]]] = {key: [] for key in keys}
    by_seed: dict[str, list[float]] = {key: [] for key in keys}
    best = dict.fromkeys(keys, 0)
    for seed in range(seeds):
        current = {key: origin[key] * 2.0 ** best[key] for key in keys}
        for key in keys:

            def loss_at(exponent: int, key: str = key, seed: int = seed, others: dict[str, float] = current) -> float:
                rates = {**others, key: origin[key] * 2.0**exponent}
                loss = tail_loss(runs.probe(rates, probe_steps, seed=seed), probe_steps)
                said = ", ".join(f"{name} {rate:.2g}" for name, rate in rates.items())
                say(f"seed {seed}, {said}: loss {loss:.4f}")
                return loss

            losses = search(loss_at, first=best[key], stride=2 if seed == 0 else 1)
            if min(losses.values()) == math.inf:
                raise UserError(
                    f"no short run with seed {seed} had a finite loss, so there is no rate to find: look at the data and "
                    "the model (`check`), or use another precision (--trainer.precision)"
                )
            if seed == 0:
                best[key] = lowest(losses)
            current[key] = origin[key] * 2.0 ** vertex(losses)
            by_seed[key].append(current[key] * factor)
            probes[key].append({origin[key] * 2.0**e: loss for e, loss in losses.items()})
    return FoundRates(
        recipe=dict(runs.rates),
        rates={key: float(f"{geometric_mean(by_seed[key]):.2g}") for key in keys},
        by_seed=by_seed,
        sweeps=sweeps,
        probes=probes,
        probe_steps=probe_steps,
        steps=runs.done,
        factor=factor,
    )

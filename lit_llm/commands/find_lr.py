"""`python -m lit_llm find-lr`: the peak learning rate of a recipe, from a sweep and short runs, as an overlay.

A sweep of each rate of the optimizer, from 1e-6 to 10, finds where training breaks. Then short runs with the recipe's schedule,
compressed, compare rates by factors of two below that. The suggestion is the lowest point of a parabola through the best three,
times a factor for the length of the run: the best rate falls with the power -0.32 of the tokens, except from trained weights.
It trains on one device and writes nothing but the overlay and the page: no run folder, no checkpoint, no log.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from lit_llm.commands.launch import launch
from lit_llm.commands.new_output import REPLACE_HELP, new_file
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import Arguments
from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import STEPS, whole


def _own_flags() -> OwnFlags:
    flags = OwnFlags(prog="python -m lit_llm find-lr")
    add = flags.add_argument
    add("--out", type=Path, help="The overlay with the suggested rates (required).")
    add("--html", type=Path, help="A page with pictures of the sweeps and the short runs.")
    add("--seeds", type=int, range=whole(1, 100), default=3, help="Repeat the comparison with other weights and data.")
    add("--sweep_steps", type=int, range=whole(20, 10**6), default=100, help="Steps of the sweep of a rate.")
    add(
        "--probe_steps", type=int, range=whole(5, STEPS), help="Steps of a short run. Default: a tenth of the run, at least 50."
    )
    add("--replace", type=bool, help=REPLACE_HELP)
    return flags


def main(words: list[str]) -> int:
    """Search, print, and write the files; returns the exit code."""
    flags = _own_flags()
    own, rest = flags.split(words)
    own.command = shlex.join(["python", "-m", "lit_llm", "find-lr", *words])
    return launch("fit", rest, lambda arguments: _run(own, arguments), own=flags)


def _run(own: argparse.Namespace, arguments: Arguments) -> int:
    from contextlib import ExitStack

    from lit_llm.commands.rate_finder import default_probe_steps, find_rates
    from lit_llm.commands.short_runs import ShortRuns
    from lit_llm.core.disk import write_text
    from lit_llm.reporting.rate_page import rate_page

    if own.out is None:
        raise UserError("find-lr needs a file for the overlay (--out overlay.yaml)")
    with ExitStack() as files:
        overlay = files.enter_context(new_file(own.out, replace=own.replace))
        page = None if own.html is None else files.enter_context(new_file(own.html, replace=own.replace, flag="--html"))
        runs = ShortRuns(arguments)
        if runs.devices > 1:
            _say(f"find-lr trains on one device, with the whole batch of the recipe's {runs.devices}")
        probe_steps = default_probe_steps(runs.steps) if own.probe_steps is None else own.probe_steps
        found = find_rates(runs, seeds=own.seeds, sweep_steps=own.sweep_steps, probe_steps=probe_steps, say=_say)
        write_text(overlay, overlay_text(found.rates, own.command))
        if page is not None:
            write_text(page, rate_page(found, "Learning rates", own.command))
    if found.factor != 1:
        print(f"rates of short runs of {found.probe_steps} steps, times {found.factor:.2f} because the run is longer:")
    elif found.probe_steps < runs.steps:
        unknown = "; not measured for adapters" if runs.has_adapters else ""
        print(f"rates of short runs of {found.probe_steps} steps, as they are: the run starts from trained weights{unknown}:")
    for key, rate in found.rates.items():
        each = found.by_seed[key]
        spread = f", {min(each):.2g} to {max(each):.2g} over {len(each)} seeds" if len(each) > 1 else ""
        print(f"{key}: {rate:g} (recipe: {found.recipe[key]:g}{spread})")
    print(f"cost: {found.steps:,} steps, {found.steps / runs.steps:.1f} times the run's {runs.steps:,}")
    print(f"Wrote {own.out}. Use it: fit --config RECIPE --config {own.out}")
    return 0


def overlay_text(rates: dict[str, float], command: str) -> str:
    """An overlay of a recipe with these rates."""
    lines = [f"# {command}", "optimizer:", "  init_args:", *(f"    {key}: {rate!r}" for key, rate in rates.items())]
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    print(text, flush=True)

"""`python -m lit_llm find-batch`: measures the gradient noise scale of a recipe, and writes an overlay with a batch size.

The advised batch has as many sequences as the noise scale. It needs twice the least possible steps and twice the least possible
samples (McCandlish et al. 2018, arXiv 1812.06162). The scale is measured in the run's first steps, on one device.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from lit_llm.commands.launch import launch
from lit_llm.commands.new_output import REPLACE_HELP, new_file_if
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import Arguments
from lit_llm.core.number_domain import STEPS, whole


def _own_flags() -> OwnFlags:
    flags = OwnFlags("find-batch")
    add = flags.add_argument
    add("--out", type=Path, help="The overlay with the advised batch. Default: it is only printed.")
    add("--seeds", range=whole(1, 100), default=3, help="Repeat the measurement with other weights and data.")
    add(
        "--noise_steps",
        range=whole(4, STEPS),
        help="Steps of each seed: half to train, half to measure. Default: a tenth of the run, at least 100.",
    )
    add("--replace", type=bool, help=REPLACE_HELP)
    return flags


def main(words: list[str]) -> int:
    """Measure the noise scale, print it and the advised batch, write the overlay of `--out`, and return the exit code."""
    flags = _own_flags()
    own, rest = flags.split(words)
    return launch("fit", rest, lambda arguments: _run(own, arguments), own=flags)


def _run(own: argparse.Namespace, arguments: Arguments) -> int:
    from lit_llm.commands.noise_scale import find_batch
    from lit_llm.commands.short_runs import ShortRuns, overlay_text
    from lit_llm.core.disk import write_text
    from lit_llm.optim.transfer import RATE_OF_BATCH

    with new_file_if(own.out, replace=own.replace, flag="--out") as overlay:
        runs, say = ShortRuns(arguments), partial(print, flush=True)
        if runs.devices > 1:
            say(f"find-batch trains on one device, with the whole batch of the recipe's {runs.devices}")
        advice = find_batch(runs, seeds=own.seeds, steps=own.noise_steps, say=say)
        if overlay is not None:
            batch = {"global_batch_size": advice.batch, "micro_batch_size": advice.micro_batch}
            write_text(overlay, overlay_text({"data": {"init_args": batch}}, own.command))
    scale, length, recipe = advice.noise.scale, runs.data.block_size, runs.data.global_batch_size
    each = [noise.scale for noise in advice.by_seed]
    spread = f", {min(each):.3g} to {max(each):.3g} over {len(each)} seeds" if len(each) > 1 else ""
    spread = spread.replace("inf", "more than measurable")
    print(f"noise scale: {scale:,.3g} sequences, {scale * length:,.3g} tokens{spread}; after {advice.steps // 2:,} steps")
    for name, batch in {"recipe": recipe, "advised": advice.batch}.items():
        print(
            f"{name}: {batch:,} sequences, {batch * length:,} tokens: {1 + scale / batch:.2g} times the least steps, "
            f"{1 + batch / scale:.2g} times the least tokens"
        )
    if advice.batch != recipe:
        power, source = RATE_OF_BATCH.get(runs.class_path.rpartition(".")[2], (0.0, ""))
        for name, rate in runs.rates.items() if power else ():
            print(f"{name} {rate:.3g} becomes {rate * (advice.batch / recipe) ** power:.3g} with this batch ({source})")
        print("Another batch needs another learning rate: run find-lr with it.")
    if own.out is not None:
        print(f"Wrote {own.out}. Use it: fit --config RECIPE --config {own.out}")
    return 0

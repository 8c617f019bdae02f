"""Processor time of `plan`: the whole command, planning alone, and a sweep.

    OMP_NUM_THREADS=1 python benchmarks/plan_time.py [--rounds 5] [--against ../another-checkout]

Seconds are those of user and system of a process of its own, so nothing is cached, and other programs change them little.
"Planning" begins when the recipe is parsed, and ends with the printed page. With `--against`, both checkouts take turns; the
medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

LLAMA_405B = (
    "--config llama3.1-8b --config strategy/fsdp2 --model.n_layer 126 --model.n_embd 16384 --model.n_head 128 "
    "--model.mlp_width 53248 --data.global_batch_size 512 --trainer.strategy.tensor_parallel 8 --trainer.strategy.pipeline 8"
)
RECIPES = {  # name: (flags, devices, hardware)
    "GPT-2 124M": ("--config gpt2-124m", 8, "h100-sxm"),
    "GPT-2 XL, FSDP2": ("--config gpt2-1.5b --config strategy/fsdp2", 8, "h100-sxm"),
    "Llama 3.1 8B, FSDP2": ("--config llama3.1-8b --config strategy/fsdp2", 8, "h100-sxm"),
    "Llama 405B, FSDP2 8 x TP 8 x PP 8": (LLAMA_405B, 512, "h100-sxm"),
    "Gemma 3 1B on a CPU": ("--config gemma3-1b", 8, "cpu"),
    "quickstart on a CPU": ("--config quickstart", 1, "cpu"),
}
SWEPT = "GPT-2 XL, FSDP2"
PLANNING = """
import gc, io, sys, time
from rich.console import Console
from lit_llm.config.planned_recipe import PlannedRecipe
from lit_llm.plan import Options, find, make_plan, sweep
from lit_llm.reporting.plan_text import render
kind, devices, hardware, *flags = sys.argv[1:]
planned = PlannedRecipe(flags, devices=int(devices))
settings, hardware = planned.settings(), find(hardware)
gc.collect()
gc.freeze()
start = time.process_time()
if kind == "sweep":
    made = len(list(sweep.variants(sweep.DEFAULT, settings, planned.layout, hardware, Options())))
    assert made >= 196
else:
    Console(file=io.StringIO(), width=80).print(render(make_plan(settings, hardware)))
print(time.process_time() - start)
"""


def whole_command(checkout: Path, flags: str, devices: int, hardware: str) -> float:
    """Seconds of user and system of `python -m lit_llm plan`."""
    words = ["-m", "lit_llm", "plan", *flags.split(), "--devices", str(devices), "--hardware", hardware]
    before = _children()
    subprocess.run([sys.executable, *words], cwd=checkout, check=True, capture_output=True)
    return _children() - before


def planning(checkout: Path, kind: str, flags: str, devices: int, hardware: str) -> float:
    """Processor seconds of a plan, or of a sweep, in a process that has parsed the recipe."""
    words = ["-c", PLANNING, kind, str(devices), hardware, *flags.split()]
    ran = subprocess.run([sys.executable, *words], cwd=checkout, check=True, capture_output=True, text=True)
    return float(ran.stdout.split()[-1])


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    here = Path(__file__).parents[1]
    checkouts = [here] if arguments.against is None else [arguments.against.resolve(), here]
    cases = [(f"whole command: {name}", whole_command, recipe) for name, recipe in RECIPES.items()]
    cases += [(f"planning: {name}", planning, ("plan", *recipe)) for name, recipe in RECIPES.items()]
    cases.append((f"196 layouts: {SWEPT}", planning, ("sweep", *RECIPES[SWEPT])))
    columns = ["seconds"] if len(checkouts) == 1 else ["before", "now", "ratio"]
    print(f"{'median of ' + str(arguments.rounds):55s}", *(f"{column:>8s}" for column in columns))
    for name, measure, values in cases:
        seconds: list[list[float]] = [[] for _ in checkouts]
        for _ in range(arguments.rounds):
            for checkout, found in zip(checkouts, seconds, strict=True):
                found.append(measure(checkout, *values))
        medians = [statistics.median(found) for found in seconds]
        cells = medians if len(medians) == 1 else [*medians, medians[1] / medians[0]]
        print(f"{name:55s}", *(f"{cell:8.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()

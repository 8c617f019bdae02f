"""Compare the learning rates that `find-lr` suggests with a grid of 12 rates, on small versions of seven recipes.

    OMP_NUM_THREADS=1 python benchmarks/find_lr.py --out find-lr.csv
    python benchmarks/find_lr.py --out find-lr.csv --table
    python benchmarks/find_lr.py --out lengths.csv --lengths    # the best rate of runs of other lengths

Each run of the grid is a whole run of the small recipe, with all rates of the recipe's optimizer multiplied by one factor, a
power of two from 2^-6 to 2^5 (finetune: 2^-1 to 2^10). The run with the suggested rates is whole, too. Runs of one seed have
the same initial weights and the same data. The final loss is the validation loss of 32 batches, averaged over three seeds,
because runs of neighbouring rates differ by up to 5 %. Each finished run is a line of the CSV file and is not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.commands.find_lr import find_rates
from lit_llm.commands.short_runs import ShortRuns
from lit_llm.training.rate_search import vertex

EXPONENTS = dict.fromkeys(("quickstart", "bytes", "chars", "gpt2-124m", "llama3.2-1b", "dial"), range(-6, 6))
EXPONENTS["finetune"] = range(-1, 11)  # a small model needs a higher rate
LENGTHS = (50, 150, 450)
SEEDS = 3
NEAR = 1.06
"""A rate is run with further seeds only if its loss with the first seed is below NEAR times the lowest loss."""
BATCHES = 32

_SMALL = [
    *("--model.n_layer", "2", "--model.n_embd", "64", "--model.n_head", "4", "--model.block_size", "32"),
    *("--data.micro_batch_size", "8", "--data.global_batch_size", "8", "--trainer.precision", "32-true"),
    *("--schedule.warmup_steps", "15", "--trainer.max_steps", "150"),
]
_BYTES = ["--data", "PythonStdlib", "--data.tokenizer", "Bytes"]
_DEBUG = ["--config", "debug", *_SMALL[6:]]
BASE = Path("find-lr-base")
TEXT = str(Path(pydoc.__file__).parent / "pydoc_data" / "topics.py")
"""Path of an English text, a part of Python's reference."""
RECIPES: dict[str, list[str]] = {
    "quickstart": ["--config", "quickstart", *_SMALL],
    "bytes": ["--config", "bytes", *_SMALL],
    "chars": ["--config", "chars", *_SMALL],
    "gpt2-124m": ["--config", "gpt2-124m", *_DEBUG],
    "llama3.2-1b": ["--config", "llama3.2-1b", *_DEBUG],
    "dial": ["--config", "dial", "--depth", "2", *_BYTES, *_SMALL],
    "finetune": [
        "--config",
        "finetune",
        "--init_from",
        str(BASE),
        "--data.paths",
        TEXT,
        *_SMALL[8:],
        "--data.block_size",
        "32",
    ],
}

LLAMA_BASE = Path("find-lr-llama-base")
CONTINUED = [*RECIPES["llama3.2-1b"], "--init_from", str(LLAMA_BASE), "--data.seed", "7"]
"""Flags of a run that continues the small LLaMA's training on the same text in another order."""
LENGTHS_OF = {
    "gpt2-124m": (RECIPES["gpt2-124m"], range(5)),
    "finetune": (RECIPES["finetune"], range(5, 10)),
    "llama3.2-1b, continued": (CONTINUED, range(1, 6)),
}


class FinalLoss(Callback):
    """Computes the mean validation loss of BATCHES batches when training ends, as `loss`."""

    loss = float("inf")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        nll = count = 0.0
        module.eval()
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            for i, batch in enumerate(trainer.datamodule.val_dataloader()):
                if i == BATCHES:
                    break
                sums = module.sums_of(batch)
                nll, count = nll + float(sums.nll), count + float(sums.count)
        self.loss = nll / count


def final_loss(runs: ShortRuns, rates: dict[str, float], seed: int) -> float:
    """Return the validation loss at the end of a whole run with the learning rates `rates`."""
    observer = FinalLoss()
    runs.probe(rates, runs.steps, seed=seed, observers=[observer])
    return observer.loss


def make_base(folder: Path = BASE, recipe: str = "gpt2-124m", rate: str = "3e-3") -> None:
    """Train a small recipe in the run folder `folder`, unless it exists. The default is the small GPT-2 for `finetune`."""
    if not (folder / "checkpoints").exists():
        words = ["fit", *RECIPES[recipe], "--run_dir", str(folder), "--optimizer.lr", rate, "--resume", "auto"]
        subprocess.run([sys.executable, "-m", "lit_llm", *words], check=True, cwd=Path.cwd(), stdout=subprocess.DEVNULL)


def read(path: Path, name: str) -> dict[str, dict[int, dict[str, str]]]:
    """Return {run: {seed: row}} of the finished runs of the recipe `name` in the CSV file `path`."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["recipe"] == name:
                    found.setdefault(row["run"], {})[int(row["seed"])] = row
    return found


def add(path: Path, **row: object) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, ["recipe", "run", "seed", "rates", "loss", "steps", "of_run", "spread"])
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def mean_loss(rows: dict[int, dict[str, str]]) -> float:
    """Return the mean of the final losses of a run over its seeds. `rows`: {seed: row}."""
    return sum(float(row["loss"]) for row in rows.values()) / len(rows)


def measure(name: str, path: Path) -> None:
    """Search rates for a recipe, then run the suggested rates and the grid. Only rates near the best (NEAR) get all seeds."""
    if name == "finetune":
        make_base()
    runs = ShortRuns(RECIPES[name])
    if "suggestion" not in read(path, name):
        found = find_rates(runs, seeds=SEEDS, sweep_steps=100, probe_steps=None)
        spread = {key: [min(each), max(each)] for key, each in found.by_seed.items()}
        loss = final_loss(runs, found.rates, 0)
        add(path, recipe=name, run="suggestion", seed=0, rates=json.dumps(found.rates), loss=loss, steps=found.steps,
            of_run=runs.steps, spread=json.dumps(spread))  # fmt: skip
    grid = {str(e): {key: rate * 2.0**e for key, rate in runs.rates.items()} for e in EXPONENTS[name]}
    grid["suggestion"] = json.loads(read(path, name)["suggestion"][0]["rates"])
    for seed in range(SEEDS):
        done = read(path, name)
        best = min((float(rows[0]["loss"]) for run, rows in done.items() if run != "suggestion"), default=0.0)
        for run, rates in grid.items():
            near = seed == 0 or run == "suggestion" or float(done[run][0]["loss"]) < NEAR * best
            if near and seed not in done.get(run, {}):
                add(path, recipe=name, run=run, seed=seed, rates=json.dumps(rates), loss=final_loss(runs, rates, seed))


def measure_lengths(path: Path) -> str:
    """Return a table of the best learning rate of whole runs of several lengths, from random and from trained weights."""
    make_base()
    make_base(LLAMA_BASE, "llama3.2-1b", "2.4e-3")
    lines = ["| recipe, small | steps | best rate | of each seed |", "|---|---|---|---|"]
    for name, (recipe, exponents) in LENGTHS_OF.items():
        for steps in LENGTHS:
            words = [*recipe, "--trainer.max_steps", str(steps), "--schedule.warmup_steps", str(steps // 10)]
            runs, label = ShortRuns(words), f"{name} {steps}"
            for seed in range(SEEDS):
                for e in exponents:
                    if seed not in read(path, label).get(str(e), {}):
                        rates = {key: rate * 2.0**e for key, rate in runs.rates.items()}
                        loss = final_loss(runs, rates, seed)
                        add(path, recipe=label, run=str(e), seed=seed, rates=json.dumps(rates), loss=loss)
            rows = {int(run): each for run, each in read(path, label).items()}
            means = {e: mean_loss(each) for e, each in rows.items()}
            each_seed = [vertex({e: float(each[seed]["loss"]) for e, each in rows.items()}) for seed in range(SEEDS)]
            best, *single = (f"{runs.rates['lr'] * 2**e:.2g}" for e in (vertex(means), *each_seed))
            lines.append(f"| {name} | {steps} | {best} | {', '.join(single)} |")
    return "\n".join(lines)


def table(path: Path) -> str:
    """Return the Markdown table of docs/evidence/find.md from the CSV file `path`."""
    lines = ["| recipe, small | suggestion (over 3 seeds) | its loss | best of 12 (factor) | excess | recipe's rates | cost |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in RECIPES:
        rows = read(path, name)
        own = rows.pop("suggestion", {})
        complete = {run: mean_loss(each) for run, each in rows.items() if len(each) == SEEDS}
        if len(own) < SEEDS or len(rows) < len(EXPONENTS[name]):
            continue
        best = min(complete, key=complete.__getitem__)
        loss, first = mean_loss(own), own[0]
        spread = json.loads(first["spread"])
        said = ", ".join(
            f"{key} {rate:.2g} ({spread[key][0]:.2g} to {spread[key][1]:.2g})"
            for key, rate in json.loads(first["rates"]).items()
        )
        lines.append(
            f"| {name} | {said} | {loss:.3f} | {complete[best]:.3f} (2^{best}) | {100 * (loss / complete[best] - 1):+.1f} % | "
            f"{mean_loss(rows['0']):.3f} | {int(first['steps']) / int(first['of_run']):.1f} runs |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("find-lr.csv"))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--table", action="store_true", help="print what the file has")
    parser.add_argument("--lengths", action="store_true", help="measure the best rate of runs of several lengths instead")
    own = parser.parse_args()
    if own.lengths:
        print(measure_lengths(own.out))
        return
    if not own.table:
        for name in own.recipes:
            measure(name, own.out)
    print(table(own.out))


if __name__ == "__main__":
    main()

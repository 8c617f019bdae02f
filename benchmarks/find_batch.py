"""Steps to a target loss at five batch sizes, against the law of the gradient noise scale that `find-batch` measures.

    OMP_NUM_THREADS=1 python benchmarks/find_batch.py --out find-batch.csv
    python benchmarks/find_batch.py --out find-batch.csv --table
    OMP_NUM_THREADS=1 python benchmarks/find_batch.py --seed 1 --out find-batch-1.csv

The recipe is a small version of chars (2 layers of width 32, AdamW, a constant rate after 10 steps of warmup). A run ends when
the mean loss of its last 256 sequences is below the target; steps are counted to the middle of these sequences. The result of a
batch size is the fewest steps over five learning rates. The law is S = S_min (1 + B_noise / B) for batch size B (McCandlish et
al. 2018, equation 2.7); S_min and B_noise are fitted to the logarithms of the steps. The noise scale is measured with batches
of 32 at fixed weights: after 0, 25 and 100 steps at a rate of 4e-3. Each finished run is a line of the CSV file. All runs of a
file have one seed, for the initial weights and the order of the data.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.commands.noise_scale import _FrozenNoise
from lit_llm.commands.short_runs import ShortRuns

BATCHES = (4, 8, 16, 64, 256)
RATES = (4e-3, 8e-3, 2e-3, 16e-3, 1e-3)
TARGET = 2.7
MOST = 1000
"""The most steps of a run. A run that does not reach the target loss ends after MOST steps."""
_WINDOW = 256
_MEASURED = (0, 25, 100)
_STEPS = 60
_RECIPE = [
    *("--config", "chars", "--model.n_layer", "2", "--model.n_embd", "32", "--model.n_head", "2", "--model.block_size", "32"),
    *("--schedule", "Constant", "--schedule.warmup_steps", "10", "--trainer.max_steps", str(MOST)),
]


def runs_of(batch: int) -> ShortRuns:
    """Return the short runs of the small recipe with batches of `batch` sequences."""
    return ShortRuns([*_RECIPE, "--data.global_batch_size", str(batch), "--data.micro_batch_size", str(batch)])


def steps_to_target(runs: ShortRuns, batch: int, rate: float, most: int, seed: int) -> int | None:
    """Train until the loss is below TARGET. Return the number of optimizer steps; None: the target needs more than `most`."""
    window = max(1, _WINDOW // batch)

    def mean(losses: Sequence[float]) -> float:
        return sum(losses[-window:]) / window if len(losses) >= window else math.inf

    def ends(losses: Sequence[float]) -> bool:
        return not math.isfinite(losses[-1]) or mean(losses) < TARGET

    losses = runs.observe(most, [], seed=seed, rates={"lr": rate}, ends=ends)
    return len(losses) - window // 2 if mean(losses) < TARGET else None


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of the CSV file `path`, one for each finished run; [] without the file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add(path: Path, kind: str, batch: int, rate: float, steps: object, trace: object = "", square: object = "") -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["kind", "batch", "rate", "steps", "trace", "square"])
        writer.writerow([kind, batch, rate, steps, trace, square])


def measure(path: Path, seed: int) -> None:
    """Measure the noise scale and the steps to the target loss, without runs that are already in the file `path`."""
    done = {(row["kind"], int(row["batch"]), float(row["rate"]), row["steps"]) for row in read(path)}
    runs = runs_of(32)
    runs.data_options = {"micro_batch_size": 8}
    for after in _MEASURED:
        if ("noise", 32, 4e-3, str(after)) not in done:
            recorder = _FrozenNoise(after)
            runs.observe(after + _STEPS, [recorder], seed=seed, rates={"lr": 4e-3}, frozen_after=after)
            noise = recorder.noise()
            add(path, "noise", 32, 4e-3, after, noise.trace, noise.square)
    finished = {(batch, rate) for kind, batch, rate, _ in done if kind == "run"}
    for batch in BATCHES[::-1]:
        runs, best = runs_of(batch), MOST
        for rate in RATES:
            if (batch, rate) in finished:
                continue
            steps = steps_to_target(runs, batch, rate, best, seed)
            best = min(best, steps or best)
            add(path, "run", batch, rate, steps or "")


def fewest(rows: list[dict[str, str]]) -> dict[int, tuple[int, float]]:
    """Return {batch size: (steps, learning rate) of the run with the fewest steps}."""
    found: dict[int, tuple[int, float]] = {}
    for row in rows:
        if row["kind"] == "run" and row["steps"]:
            each = int(row["steps"]), float(row["rate"])
            found[int(row["batch"])] = min(found.get(int(row["batch"]), each), each)
    return dict(sorted(found.items()))


def fitted(steps: dict[int, int]) -> tuple[float, float]:
    """Return (S_min, B_noise), fitted to log(steps) by least squares with a search over B_noise. `steps`: by batch size."""

    def at(noise: float) -> tuple[float, float]:
        logs = [math.log(count) - math.log(1 + noise / batch) for batch, count in steps.items()]
        mean = sum(logs) / len(logs)
        return sum((each - mean) ** 2 for each in logs), math.exp(mean)

    noise = min((2 ** (i / 50) for i in range(-100, 700)), key=lambda value: at(value)[0])
    return at(noise)[1], noise


def table(path: Path) -> str:
    """Return the Markdown tables of docs/evidence/find.md from the CSV file `path`."""
    rows = read(path)
    found = fewest(rows)
    least, noise = fitted({batch: steps for batch, (steps, _) in found.items()})
    lines = [
        f"S_min {least:.0f} steps, B_noise {noise:.0f} sequences",
        "",
        "| batch | best rate | steps | the law | sequences |",
    ]
    lines.append("|---|---|---|---|---|")
    for batch, (steps, rate) in found.items():
        lines.append(f"| {batch} | {rate:g} | {steps} | {least * (1 + noise / batch):.0f} | {steps * batch:,} |")
    lines += ["", "| after steps | tr(Σ) | squared norm | B_simple |", "|---|---|---|---|"]
    for row in rows:
        if row["kind"] == "noise":
            trace, square = float(row["trace"]), float(row["square"])
            lines.append(f"| {row['steps']} | {trace:.3g} | {square:.3g} | {trace / square:.3g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("find-batch.csv"))
    parser.add_argument("--seed", type=int, default=0, help="a file has one (default: 0)")
    parser.add_argument("--table", action="store_true", help="print what the file has")
    own = parser.parse_args()
    if not own.table:
        measure(own.out, own.seed)
    print(table(own.out))


if __name__ == "__main__":
    main()

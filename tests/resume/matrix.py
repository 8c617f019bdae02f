"""Repeatedly killed runs, compared with uninterrupted ones, over combinations of settings.

    python tests/resume/matrix.py FOLDER [--kills 4] [--seed 0] [--only fsdp2]

A cell is a tiny recipe on 1 or 2 processes: 20 steps, a save every 3 and 10, a validation every 4, 1.5 passes over its data. It
is run without interruption. Then it is run again, killed by SIGKILL and continued with `--resume auto` until it is complete.
Half of the kills come at a random moment, and half of those hit one process up to a second before the others. The other half
come at a random operation on a checkpoint's files. These must equal the uninterrupted run: every logged number, the ids of
every sample on every rank, every value of the last checkpoint and the names of the files beside it.

With loader workers, a cell also saves in the background and, under FSDP2, in shards. The uninterrupted run does neither.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from launcher import Launcher, Run
from run_comparison import LEDGER, differences

STEPS = 20
RECIPE = """
model: {n_layer: 2, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: TextFiles
  init_args: {paths: text.txt, global_batch_size: 4}
schedule: {class_path: WSD, init_args: {warmup_steps: 4, decay_steps: 7}}
spike_guard: {window: 16, min_steps: 8, sigma: 4}
gradient_norm: {clip: 0.8}
validation: {every_n_steps: 4}
checkpoint: {every_n_steps: 3, keep_every_n_steps: 10}
trainer:
  max_steps: %d
  log_every_n_steps: 1
  accelerator: cpu
  callbacks: [{class_path: sample_ledger.SampleLedger}]
"""
TEXT = "".join(f"{i} times {i} is {i * i}, that is {i % 7} more than {i * i - i % 7}\n" for i in range(22))  # 45 blocks
LAYOUTS = ("1 single", "1 ddp", "1 fsdp2", "2 ddp", "2 fsdp2")
OVERLAYS = Path(__file__).parents[2] / "recipes" / "strategy"


_SHARING = {"tp": 2, "cp": 2, "pp": 2, "fsdp2-tp": 2, "fsdp2-pp": 2, "fsdp2-cp": 2, "3d": 4}
"""Ranks that share their samples, by overlay."""


class Cell(NamedTuple):
    """One combination of settings."""

    layout: str
    accumulate: int
    workers: int
    dropout: float
    precision: str

    @property
    def ranks(self) -> int:
        return int(self.layout.split()[0])

    @property
    def straight(self) -> str:
        """The straight run that it must equal."""
        return "-".join(map(str, (*self.layout.split(), self.accumulate, self.dropout, self.precision)))

    def flags(self) -> list[str]:
        overlay = OVERLAYS / f"{self.layout.split()[1]}.yaml"
        micro = 4 // (self.ranks // _SHARING.get(self.layout.split()[1], 1) * self.accumulate)
        return [
            *("--config", str(overlay), "--trainer.devices", str(self.ranks), "--data.micro_batch_size", str(micro)),
            *("--model.dropout", str(self.dropout), "--trainer.precision", self.precision),
        ]

    def other_flags(self) -> list[str]:
        """Flags that must not change the result."""
        if self.workers == 0:
            return []
        sharded = ["--sharded_checkpoints", "true"] if self.layout.split()[1] not in ("single", "ddp") else []
        return ["--data.num_workers", str(self.workers), "--async_checkpoints", "true", *sharded]


CELLS = [Cell(*parts) for parts in itertools.product(LAYOUTS, (1, 2), (0, 2), (0.0, 0.2), ("32-true", "bf16-mixed"))]
CELLS += [  # other layouts, once each
    Cell("2 tp", 2, 2, 0.2, "bf16-mixed"),
    Cell("2 cp", 2, 2, 0.2, "bf16-mixed"),
    Cell("2 pp", 2, 2, 0.2, "bf16-mixed"),
    Cell("4 ddp", 1, 0, 0.2, "32-true"),
    Cell("4 fsdp2", 1, 2, 0.2, "bf16-mixed"),
    Cell("4 hsdp", 1, 2, 0.2, "32-true"),
    Cell("4 fsdp2-tp", 2, 2, 0.2, "32-true"),
    Cell("4 fsdp2-cp", 2, 2, 0.2, "32-true"),
    Cell("4 fsdp2-pp", 2, 2, 0.2, "32-true"),
    Cell("8 3d", 2, 2, 0.2, "32-true"),
]


class Result(NamedTuple):
    """The result of a cell."""

    kills: int
    in_a_save: int
    """Those that left a half-made save or deletion behind."""
    values: int
    differing: int
    found: list[str]


def prepare(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT)
    (folder / "recipe.yaml").write_text(RECIPE % STEPS)


def fit(cell: Cell, run_dir: str, *more: str) -> list[str]:
    return ["fit", "--config", "recipe.yaml", "--run_dir", run_dir, "--resume", "auto", *cell.flags(), *more]


class Straight(NamedTuple):
    """An uninterrupted run."""

    seconds_to_start: float
    seconds_of_training: float
    operations: int


def run_straight(launcher: Launcher, cell: Cell, folder: Path) -> Straight:
    began = time.monotonic()
    run = launcher.start(fit(cell, cell.straight), folder, ranks=cell.ranks, log=f"{cell.straight}.log", die_at=0)
    wait_for_training(run, folder / cell.straight)
    started = time.monotonic()
    assert set(run.wait()) == {0}, run.said()
    return Straight(started - began, time.monotonic() - started, int((folder / "operations").read_text()))


def wait_for_training(run: Run, run_dir: Path, more_than: int = 0) -> None:
    """Wait until rank 0 has begun a step or has ended."""
    file = run_dir / LEDGER.format(0)
    while not (file.exists() and file.stat().st_size > more_than) and run.alive():
        time.sleep(0.002)


def run_killed(
    launcher: Launcher, cell: Cell, folder: Path, straight: Straight, kills: int, rng: random.Random
) -> tuple[int, int]:
    """Kill and continue until the run is complete; returns (kills, kills during a save or deletion)."""
    name = f"{cell.straight}-{cell.workers}"
    arguments, log = fit(cell, name, *cell.other_flags()), f"{name}.log"
    ledger, checkpoints = folder / name / LEDGER.format(0), folder / name / "checkpoints"
    done, in_a_save = 0, 0
    for turn in range(kills):
        # Kill early enough in the remaining time that most kills hit a running process.
        share = 1.5 / (kills - turn + 1)
        if turn % 2 == 0:
            die_at = rng.randint(1, max(1, int(straight.operations * share)))
            run = launcher.start(arguments, folder, ranks=cell.ranks, log=log, die_at=die_at)
        else:
            size = ledger.stat().st_size if ledger.exists() else 0
            run = launcher.start(arguments, folder, ranks=cell.ranks, log=log)
            if rng.random() < 0.2:
                time.sleep(rng.uniform(0, straight.seconds_to_start))
            else:
                wait_for_training(run, folder / name, size)
                time.sleep(rng.uniform(0, straight.seconds_of_training * share))
            if cell.ranks > 1 and rng.random() < 0.5:
                run.signal(signal.SIGKILL, rng.randrange(cell.ranks))
                time.sleep(rng.uniform(0, 1))  # time for the others to notice; a launcher ends them soon after
            run.kill()
        codes = run.wait()
        if set(codes) == {0}:
            break
        assert -9 in codes, run.said()
        done += 1
        in_a_save += any(p.name.startswith(".") for p in checkpoints.iterdir()) if checkpoints.exists() else 0
    run = launcher.run(arguments, folder, ranks=cell.ranks, log=log)
    assert set(run.wait()) == {0}, run.said()
    return done, in_a_save


def run_cell(
    launcher: Launcher, cell: Cell, folder: Path, known: dict[str, Straight], kills: int, rng: random.Random
) -> Result:
    """Run one cell. Uninterrupted runs are made once and cached in `known`."""
    if cell.straight not in known:
        known[cell.straight] = run_straight(launcher, cell, folder)
    done, in_a_save = run_killed(launcher, cell, folder, known[cell.straight], kills, rng)
    runs = [folder / cell.straight, folder / f"{cell.straight}-{cell.workers}"]
    rows, found = differences(*runs)
    for run in runs:
        found += [f"{run.name}: {problem}" for problem in problems_of_curves(run)]
    left, right = ({path.name for path in (run / "checkpoints").iterdir()} for run in runs)
    rows.append(("files in checkpoints/", len(left | right), len(left ^ right)))
    if left != right:
        found.append(f"checkpoints/ holds {sorted(right)}, and straight {sorted(left)}")
    return Result(done, in_a_save, sum(count for _, count, _ in rows), sum(differ for *_, differ in rows), found)


def problems_of_curves(run: Path) -> list[str]:
    """Steps that metrics.jsonl has twice."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    pairs = [(line["step"], tag) for line in lines for tag in line.keys() - {"step", "time"}]
    return [f"metrics.jsonl has {pair} twice" for pair in {pair for pair in pairs if pairs.count(pair) > 1}]


HEADER = (
    "| processes, strategy | accumulation | workers | dropout | precision | kills | in a save | values | differ |\n|"
    + "---|" * 9
)


def report(launcher: Launcher, cells: list[Cell], folder: Path, kills: int, seed: int) -> tuple[list[Result], str]:
    """Run cells, and print a table row for each and a summary."""
    rng, known, results = random.Random(seed), dict[str, Straight](), list[Result]()
    print(HEADER)
    for cell in cells:
        result = run_cell(launcher, cell, folder, known, kills, rng)
        print("| " + " | ".join(map(str, (*cell, *result[:4]))) + " |", *result.found, sep="\n  ", flush=True)
        results.append(result)
    total = [sum(column) for column in list(zip(*results, strict=True))[:4]]
    summary = (
        f"{len(cells)} cells: {total[0]} kills, {total[1]} of them in a save; {total[2]} values compared, {total[3]} differ"
    )
    print(summary)
    return results, summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options.folder)
    os.environ["LIT_LLM_CACHE"] = str(options.folder / "cache")
    cells = [cell for cell in CELLS if options.only in cell.layout]
    results, _ = report(Launcher(), cells, options.folder, options.kills, options.seed)
    return int(any(result.differing for result in results))


if __name__ == "__main__":
    sys.exit(main())

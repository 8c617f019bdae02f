"""Cost of a callback per optimizer step: two fits of a recipe, with and without the callback, alternate step by step.

Both runs share one process and wait for each other after every step, so other load on the machine affects both equally. The
run that starts first alternates. The result is the mean over all steps except the first five, so work done only in some steps
counts too, in wall time and in CPU time of the process, which other load affects less. With several ranks, Lightning starts the
other processes (`--ranks 2` is DDP over gloo on a CPU).

    python benchmarks/callback_cost.py time_breakdown=TimeBreakdown [--runs 4] [--steps 100] [--ranks 2] [any flag of fit]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lit_llm.config.build import build
from lit_llm.config.parse import parse
from lit_llm.config.resolve import decide

WARMUP = 5  # steps before the clock starts


class Turns(Callback):
    """Times the steps of a run. Each step starts when the other run, whose callback is `other`, has finished a step."""

    def __init__(self) -> None:
        self.ready, self.turn = threading.Event(), threading.Semaphore(0)
        self.other: Turns
        self.seconds: list[tuple[float, float]] = []  # (wall, CPU)
        self.step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.ready.set()
        self.take_turn()

    def take_turn(self) -> None:
        self.turn.acquire()
        self.begin = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        self.seconds.append((time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]))
        self.other.turn.release()
        if self.step < trainer.max_steps:
            self.take_turn()


def step_seconds(flags: list[str], group: str, name: str, folder: Path, *, with_it_first: bool) -> list[tuple[float, float]]:
    """Return [(mean seconds of a step with the callback, without)] for wall time, then for CPU time.

    `group`, `name`: the recipe's group and class of the callback. `with_it_first`: whether the run with it starts first."""
    never = "1000000"
    runs = []
    for value, run_dir in ((name, "with"), ("null", "without")):
        cli = build(decide(parse("fit", [
            *flags, f"--{group}", value, "--run_dir", str(folder / run_dir), "--trainer.limit_val_batches", "0",
            "--trainer.enable_progress_bar", "false", "--checkpoint", "null", "--signals", "null",
            "--samples.every_n_steps", never, "--schedule.warmup_steps", "2",
        ])))  # fmt: skip
        runs.append((cli, Turns()))
    (_, first), (_, second) = runs
    first.other, second.other = second, first
    threads = []
    for cli, turns in runs if with_it_first else reversed(runs):  # the setup, one run after the other, is not timed
        cli.trainer.callbacks.append(turns)
        thread = threading.Thread(target=cli.trainer.fit, args=(cli.model,), kwargs={"datamodule": cli.datamodule}, daemon=True)
        thread.start()
        threads.append(thread)
        if not turns.ready.wait(timeout=300):
            raise RuntimeError("the run did not start")
    (first if with_it_first else second).turn.release()
    for thread in threads:
        thread.join()
    clocks = zip(zip(*first.seconds[WARMUP:], strict=True), zip(*second.seconds[WARMUP:], strict=True), strict=True)
    return [(statistics.mean(with_it), statistics.mean(without)) for with_it, without in clocks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", help="the callback to measure, as GROUP=CLASS or GROUP={class_path: …, init_args: …}")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    options, flags = parser.parse_known_args()
    group, _, name = options.group.partition("=")
    flags = ["--config", options.recipe, "--trainer.max_steps", str(options.steps + WARMUP), *flags]
    if options.ranks > 1:
        flags += ["--trainer.accelerator", "cpu", "--trainer.devices", str(options.ranks), "--trainer.strategy", "ddp"]
    ratios: dict[str, list[float]] = {"wall": [], "CPU": []}
    is_first_rank = os.environ.get("LOCAL_RANK", "0") == "0"
    for run in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            seconds = step_seconds(flags, group, name, Path(folder), with_it_first=run % 2 == 0)
        for clock, (with_it, without) in zip(ratios, seconds, strict=True):
            ratios[clock].append(with_it / without)
            if is_first_rank:
                times = f"with {with_it * 1e3:.2f} ms, without {without * 1e3:.2f} ms"
                print(f"run {run + 1}, {clock}: {times}, ratio {ratios[clock][-1]:.3f}", flush=True)
    for clock, found in ratios.items():
        if is_first_rank:
            print(f"{clock}: median ratio {statistics.median(found):.3f} (min {min(found):.3f}, max {max(found):.3f})")


if __name__ == "__main__":
    main()

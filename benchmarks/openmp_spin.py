"""Tokens per second of recipes on a CPU by how long idle OpenMP threads spin, on a quiet machine and beside busy processes.

    python benchmarks/openmp_spin.py [--rounds 5] [--steps 20] [--busy 2] [--cases quickstart chars]

Each setting has its own process, which trains the first steps of the recipe again and again. The settings take turns, in
another order in each round, first alone and then beside `--busy` processes that compute all the time. The first 3 steps of each
run are not counted. Ratios are medians of the ratios to the default setting in the same round. No other program should run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = {
    "quickstart": ["--config", "quickstart"],
    "bytes": ["--config", "bytes"],
    "chars": ["--config", "chars"],
    "6 x 384": ["--config", "quickstart", "--model.n_layer", "6", "--model.n_head", "6", "--model.n_embd", "384"],
}
SETTINGS = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 20,000": {"GOMP_SPINCOUNT": "20000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
WARM_UP = 3
SAID = "tokens/s: "


def work(flags: list[str]) -> None:
    """Read numbers of steps from stdin, one a line. After each line, train so many steps and print the tokens per second."""
    from lightning.pytorch import Callback

    from lit_llm.commands.short_runs import ShortRuns
    from lit_llm.config.arguments import read

    class Timer(Callback):
        times: list[float]

        def on_before_zero_grad(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

    runs, timer = ShortRuns(read(flags)), Timer()
    tokens = runs.data.global_batch_size * runs.data.block_size
    for line in sys.stdin:
        timer.times = []
        runs.observe(int(line) + WARM_UP, [timer], seed=1)
        measured = timer.times[WARM_UP - 1 :]
        print(f"{SAID}{tokens * (len(measured) - 1) / (measured[-1] - measured[0]):.1f}", flush=True)


def start(name: str, setting: str, precision: str) -> subprocess.Popen[str]:
    left = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS"}
    env = {key: value for key, value in os.environ.items() if key not in left} | SETTINGS[setting]
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, __file__, "--worker", *CASES[name], "--trainer.precision", precision]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def speed(process: subprocess.Popen[str], steps: int) -> float:
    assert process.stdin is not None and process.stdout is not None
    print(steps, file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith(SAID):
            return float(line.removeprefix(SAID))
    raise SystemExit(f"a worker ended with exit code {process.wait()}")


@contextlib.contextmanager
def others(count: int) -> Any:
    """Run `count` busy processes during the `with` block. They also end if this process is killed."""
    spin = "import os\nfirst = os.getppid()\nwhile os.getppid() == first: sum(range(10_000))"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--busy", type=int, default=2, help="processes beside the run")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    own = parser.parse_args()
    names = list(SETTINGS)
    print("| recipe | busy processes | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 2) + "|", flush=True)
    for case in own.cases:
        workers = {name: start(case, name, own.precision) for name in names}
        try:
            for worker in workers.values():
                speed(worker, 1)  # compiles nothing, but reads the data
            for count in (0, own.busy):
                found: dict[str, list[float]] = {name: [] for name in names}
                with others(count):
                    for turn in range(own.rounds):
                        for name in names[turn % len(names) :] + names[: turn % len(names)]:
                            found[name].append(speed(workers[name], own.steps))
                cells = [f"{statistics.median(found['default']):,.0f}"]
                for name in names[1:]:
                    ratio = statistics.median(a / b for a, b in zip(found[name], found["default"], strict=True))
                    cells.append(f"{statistics.median(found[name]):,.0f} ({ratio:.2f})")
                print(f"| {case} | {count} | " + " | ".join(cells) + " |", flush=True)
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    else:
        main()

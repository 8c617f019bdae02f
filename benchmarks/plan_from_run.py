"""`plan --from_run`: short CPU runs of different sizes; the speed of each predicts the step of the others.

    OMP_NUM_THREADS=1 python benchmarks/plan_from_run.py

Prints measured over predicted seconds per step for each pair, and what PlanMonitor costs: the same run with and without it,
in turns. Seconds are processor time, so that other processes on the machine matter less. Takes about four minutes on an idle
core.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from lit_llm.__main__ import main
from lit_llm.callbacks import throughput
from lit_llm.plan.measured_run import MeasuredRun, measured_run, with_slowness
from lit_llm.plan.speed import Options, step_times

SIZES = {  # name: layers, width, tokens of a sequence, sequences, optimizer
    "64 wide": (2, 64, 64, 16, "MuonAdamW"),
    "128 wide": (4, 128, 128, 8, "MuonAdamW"),
    "128 wide, AdamW": (4, 128, 128, 8, "torch.optim.AdamW"),
    "256 wide": (4, 256, 256, 4, "MuonAdamW"),
    "256 wide, 8 layers": (8, 256, 128, 8, "MuonAdamW"),
    "384 wide": (4, 384, 256, 4, "MuonAdamW"),
    "512 wide": (4, 512, 128, 8, "MuonAdamW"),
}


def train(name: str, run_dir: str, *more: str, steps: int = 24) -> None:
    """One short run."""
    layers, width, length, sequences, optimizer = SIZES[name]
    words = [
        *("fit", "--data", "TextFiles", "--data.paths", "text.txt", "--data.tokenizer", "Bytes"),
        *("--run_dir", run_dir, "--optimizer", optimizer, "--data.num_workers", "0"),
        *("--model.n_layer", str(layers), "--model.n_head", str(width // 32), "--model.n_embd", str(width)),
        *("--model.block_size", str(length), "--data.global_batch_size", str(sequences)),
        *("--trainer.max_steps", str(steps), "--trainer.log_every_n_steps", "2", "--trainer.accelerator", "cpu"),
        *("--trainer.limit_val_batches", "1", "--validation", "null", "--schedule.warmup_steps", "1", *more),
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    assert code == 0, errors.getvalue()


def predicted(source: MeasuredRun, target: MeasuredRun) -> float:
    """Seconds per step of `target` with the speed of `source`."""
    seconds = step_times(target.settings, source.hardware, Options(measured=with_slowness(source))).step
    assert seconds is not None
    return seconds


def accuracy() -> None:
    """Print the table of ratios."""
    for name in SIZES:
        train(name, f"runs/{name}")
    runs = {name: measured_run(Path("runs") / name) for name in SIZES}
    print("| from \\ to | ms per step | " + " | ".join(SIZES) + " |")
    print("|---|---|" + "---|" * len(SIZES))
    off = []
    for source in SIZES:
        ratios = {target: runs[target].step_seconds / predicted(runs[source], runs[target]) for target in SIZES}
        off += [(abs(ratio - 1), source, target) for target, ratio in ratios.items() if target != source]
        assert abs(ratios[source] - 1) < 1e-9
        print(f"| {source} | {runs[source].step_seconds * 1e3:.1f} | " + " | ".join(f"{r:.2f}" for r in ratios.values()) + " |")
    worst = max(off)
    print(f"median {statistics.median(each for each, *_ in off):.0%} off; worst {worst[0]:.0%}, from {worst[1]} to {worst[2]}")


def cost(pairs: int = 9) -> None:
    """Print the seconds per step with PlanMonitor over those without it. Each row is logged."""
    ratios = []
    speeds = {}
    for i, kind in itertools.product(range(pairs), ("with", "without")):
        words = [] if kind == "with" else ["--plan", "null"]
        train("128 wide", f"runs/{kind}-{i}", "--trainer.log_every_n_steps", "1", *words)
        speeds[kind] = _tokens_per_second(f"runs/{kind}-{i}")
        if kind == "without":
            ratios.append(speeds["without"] / speeds["with"])
    print(f"PlanMonitor: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {pairs} pairs)")


def _tokens_per_second(run_dir: str) -> float:
    """The median of a run's rows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(run_dir)
    events.Reload()
    return statistics.median(row.value for row in events.Scalars("throughput/tokens_per_second"))


if __name__ == "__main__":
    throughput.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        Path("text.txt").write_text("".join(f"line {i} of a text, {i * i}\n" for i in range(20_000)))
        accuracy()
        cost()

"""Processor time of the callback `HealthSignals` or `Histograms` in a step that it samples and in other steps, and of a step.

    OMP_NUM_THREADS=1 python benchmarks/health_cost.py [--recipe FILE] [--steps 9] [--every 100] [flags of fit]
    OMP_NUM_THREADS=1 python benchmarks/health_cost.py --group histograms --every 500

Every second step is sampled. The callback's share of the time is computed for one sampled step in `--every` steps. Times are
medians, without the first sampled step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from typing import Any

from lightning.pytorch import Callback

from lit_llm.callbacks import HealthSignals, Histograms
from lit_llm.config.build import build
from lit_llm.config.parse import parse
from lit_llm.config.resolve import decide

KINDS: dict[str, type[Callback]] = {"health": HealthSignals, "histograms": Histograms}
HOOKS = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")


class StepTimes(Callback):
    """Records the processor time at the end of each micro-batch."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.marks.append(time.process_time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--group", choices=KINDS, default="health")
    options, flags = parser.parse_known_args()
    kind = KINDS[options.group]
    spent: dict[tuple[str, bool], list[float]] = {}  # hook, whether the step is sampled

    def timed(hook: str, call: Any, trainer: Any, *arguments: Any) -> None:
        step = trainer.global_step + (hook != "on_train_batch_end")
        began = time.process_time()
        call(trainer, *arguments)
        spent.setdefault((hook, step == 1 or step % 2 == 0), []).append(time.process_time() - began)

    with tempfile.TemporaryDirectory() as folder:
        cli = build(decide(parse("fit", [
            "--config", options.recipe, "--run_dir", f"{folder}/run", "--trainer.max_steps", str(options.steps),
            f"--{options.group}", kind.__name__, f"--{options.group}.every_n_steps", "2", "--trainer.limit_val_batches", "0",
            "--checkpoint", "null", "--signals", "null", "--samples", "null", "--schedule.warmup_steps", "1", *flags,
        ])))  # fmt: skip
        measured = next(c for c in cli.trainer.callbacks if isinstance(c, kind))  # type: ignore[attr-defined]
        for hook in HOOKS:
            setattr(measured, hook, partial(timed, hook, getattr(measured, hook)))
        steps = StepTimes()
        cli.trainer.callbacks.append(steps)  # type: ignore[attr-defined]
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    sampled = sum(statistics.median(spent[hook, True][1:]) for hook in HOOKS)
    other = sum(statistics.median(spent[hook, False]) for hook in HOOKS)
    plain = [later - before for before, later in zip(steps.marks, steps.marks[1:], strict=False)][1::2]  # steps 3, 5, …
    step = statistics.median(plain)
    print(f"sampled step: {sampled * 1e3:.1f} ms, other steps: {other * 1e3:.2f} ms, a step: {step * 1e3:.0f} ms")
    print(f"one step in {options.every} sampled: {(sampled / options.every + other) / step:.2%} of the time")


if __name__ == "__main__":
    main()

"""`python -m lit_llm verify-resume`: a recipe straight and interrupted, and whether they are the same run, bit for bit.

Three runs in a temporary folder: straight through; interrupted at a random step (SIGTERM, or with `--kill` SIGKILL to every
process of it); continued with `--resume auto`. Then every logged number, the ids of every sample in the order of every rank,
and every value in the last checkpoints are compared. All flags of `fit` are passed on (`--trainer.devices 2 --trainer.strategy
ddp`). The runs end after `--steps`, on the schedule of the whole recipe; set here are trainer.log_every_n_steps (1) and, with
`--kill`, checkpoint.every_n_steps (a fifth of the steps, so that there is something to continue from).
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.checkpoint.format import read
from lit_llm.errors import UserError
from lit_llm.runs.run_folder import CHECKPOINTS

LEDGER = "samples-rank{}.jsonl"
# How fast it went and what it took differs between any two runs.
NOT_COMPARED = ("throughput/", "time/", "memory/", "plan/", "rank/")
# In a checkpoint the same, and which files are on disk: a signal saves one more.
NOT_COMPARED_STATE = re.compile(r"time|second|StepCheckpoint\.(kept|permanent|leaving)")
CAUSES = {
    "samples": "the order of samples or the position in it was not restored (data module, loader)",
    "train/loss": "weights, optimizer state or random draws were not restored",
    "lr": "the schedule depends on something besides the step, or trainer.max_steps differed",
    "grad/norm": "gradients differ: accumulation restarted inside a step, or random draws",
    "val/loss": "validation is not over a fixed set in a fixed order",
}


class SampleLedger(Callback):
    """Writes a checksum of every sample's ids, by optimizer step, to `samples-rank<r>.jsonl` in the run folder.

    Args:
        stop_after: optimizer steps after which the run ends; null = as it would.
        interrupt_at: the optimizer step, 1, 2, …, in which rank 0 interrupts the run; null = never.
        kill_after: null: interrupt by SIGTERM to rank 0 when the step begins. Else by SIGKILL to every process, later by this
            many times the length of the step before, or at the end of training if that comes first.
    """

    def __init__(self, stop_after: int | None = None, interrupt_at: int | None = None, kill_after: float | None = None) -> None:
        self.stop_after, self.interrupt_at, self.kill_after = stop_after, interrupt_at, kill_after
        self.step, self.began, self.length = 0, 0.0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file = open(Path(trainer.default_root_dir) / LEDGER.format(trainer.global_rank), "a")  # noqa: SIM115  closed at the end
        self.file.write("[0]\n")  # a process begins: what it makes again replaces what was made before
        self.stop(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        checksums = [zlib.crc32(sample.tobytes()) for sample in batch["input_ids"].cpu().numpy()]
        self.file.write(json.dumps([step, *checksums]) + "\n")
        self.file.flush()  # a kill loses no line
        if step == self.step:
            return
        now = time.monotonic()
        self.step, self.began, self.length = step, now, now - self.began
        if step == self.interrupt_at and trainer.is_global_zero:
            if self.kill_after is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                threading.Timer(self.kill_after * self.length, self.kill).start()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.stop(trainer)

    def stop(self, trainer: Trainer) -> None:
        if self.stop_after is not None and trainer.global_step >= self.stop_after:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file.close()
        if self.kill_after is not None and trainer.is_global_zero:
            self.kill()

    def kill(self) -> None:
        os.killpg(0, signal.SIGKILL)  # the whole run: other ranks and loader workers too


def ledger(run: Path, rank: int = 0) -> dict[int, list[int]]:
    """Checksums of a rank's samples, in order, by step; a step made again after an interruption counts as it was made last."""
    steps: dict[int, list[int]] = {}
    previous = -1
    path = run / LEDGER.format(rank)
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            step, *checksums = json.loads(line)
        except ValueError:
            continue  # cut by a kill
        if step != previous:
            steps[step] = []
        steps[step] += checksums
        previous = step
    steps.pop(0, None)
    return steps


def curves(run: Path) -> dict[str, dict[int, float]]:
    """Every logged number by name and step, except those that are about time."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of every row that a resumed run made again
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if not name.startswith(NOT_COMPARED)]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names}


def differences(straight: Path, interrupted: Path) -> tuple[list[tuple[str, int, int]], list[str]]:
    """What was compared, as (name, values, different ones), and a sentence for the first difference of each."""
    rows: list[tuple[str, int, int]] = []
    found: list[str] = []

    def compare(name: str, a: dict[Any, Any], b: dict[Any, Any]) -> None:
        different = [key for key in sorted(a.keys() | b.keys()) if not same(a.get(key), b.get(key))]
        if a or b:
            rows.append((name, len(a.keys() | b.keys()), len(different)))
        if different:
            first = different[0]
            cause = next((text for known, text in CAUSES.items() if name.startswith(known)), "some state was not restored")
            found.append(f"{name} differs first at {first}: {short(a.get(first))} and {short(b.get(first))}. Likely: {cause}.")

    for rank in range(len(list(straight.glob(LEDGER.format("*"))))):
        compare(f"samples of rank {rank}, by step", ledger(straight, rank), ledger(interrupted, rank))
    a, b = curves(straight), curves(interrupted)
    for name in sorted(a.keys() | b.keys()):
        compare(name, a.get(name, {}), b.get(name, {}))
    last = [read(run / CHECKPOINTS / "last.ckpt") for run in (straight, interrupted)]
    for part in sorted(last[0].keys() | last[1].keys()):
        compare(f"checkpoint: {part}", *(dict(values(side.get(part), part)) for side in last))
    return rows, found


def values(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value in nested dicts and lists, by its path, that is to be compared."""
    if isinstance(tree, dict | list | tuple):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from values(item, f"{path}.{key}")
    elif not NOT_COMPARED_STATE.search(path):
        yield path, tree


def same(a: Any, b: Any) -> bool:
    """Bit for bit; NaN is NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b) or (a != a and b != b and a is not None and b is not None)


def short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "nothing" if value is None else str(value)


def fit(arguments: list[str], run: Path, ledger: dict[str, Any], extra: list[str]) -> int:
    """Run `fit` with a ledger, to whatever end; returns its exit code. What it prints is in `<run>.log`."""
    overlay = run.parent / f"{run.name}.yaml"
    callback = {"class_path": f"{__name__}.SampleLedger", "init_args": ledger}
    overlay.write_text(json.dumps({"trainer": {"callbacks+": [callback]}}))
    return launch(["fit", *arguments, "--config", str(overlay), "--run_dir", str(run), *extra], run.parent / f"{run.name}.log")


def launch(arguments: list[str], log: Path) -> int:
    """Run `python -m lit_llm ARGUMENTS` as a process group of its own; returns its exit code."""
    command = [sys.executable, "-m", "lit_llm", *arguments]
    with open(log, "w") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, check=False).returncode


def complaint(run: Path) -> str:
    """What a run that failed has to say: its error lines, else the end of what it printed."""
    said = (run.parent / f"{run.name}.log").read_text()
    errors = [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]
    return "\n".join(errors) or said[-2000:].strip()


def main(arguments: list[str]) -> int:
    """Print a certificate, or what differs first and the likely cause. Exit code 0 if nothing differs, else 1.

    Raises:
        UserError: the recipe does not run, with its own messages.
    """
    arguments = list(arguments)
    if "--help" in arguments or "-h" in arguments:
        print(f"usage: python -m lit_llm verify-resume --config RECIPE [--steps N] [--kill] [any flag of fit]\n\n{__doc__}")
        return 0
    kill, steps = take_own_flags(arguments)
    extra = ["--trainer.log_every_n_steps", "1"]
    if kill:
        extra += ["--checkpoint.every_n_steps", str(max(1, steps // 5))]
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        straight, interrupted = Path(folder) / "straight", Path(folder) / "interrupted"
        if fit(arguments, straight, {"stop_after": steps}, extra) != 0:
            raise UserError(complaint(straight))
        if (made := max(ledger(straight))) < steps:
            raise UserError(f"the recipe ends after {made} steps (--steps {made}, or --trainer.max_steps)")
        first, last = (steps // 5 + 2, steps) if kill else (1, steps - 1)  # killed after a save, or told before the last step
        at_step = random.randint(min(first, last), last)
        plan = {"stop_after": steps, "interrupt_at": at_step, "kill_after": random.random() if kill else None}
        code = fit(arguments, interrupted, plan, extra)
        print(f"interrupted in step {at_step} of {steps} by {'SIGKILL' if kill else 'SIGTERM'}: exit code {code}")
        if code != (-signal.SIGKILL if kill else 75):
            raise UserError(complaint(interrupted))
        if fit(arguments, interrupted, {"stop_after": steps}, [*extra, "--resume", "auto"]) != 0:
            raise UserError(complaint(interrupted))
        resumed = re.search(r"^resume: from step (\d+)", (Path(folder) / "interrupted.log").read_text(), re.M)
        if resumed is None:
            raise UserError("no checkpoint was left to continue from: verify-resume needs them saved (--checkpoint)")
        rows, found = differences(straight, interrupted)
    print(f"continued from step {resumed[1]}")
    for name, count, different in rows:
        print(f"  {name:32s} {count:6d} compared, {different} differ")
    if found:
        print("NOT the same run:\n  " + "\n  ".join(found))
        return 1
    print("certificate: the interrupted run is the straight one, bit for bit.")
    return 0


def take_own_flags(arguments: list[str]) -> tuple[bool, int]:
    """Remove --kill and --steps from flags that are otherwise those of `fit`.

    Raises:
        UserError: steps is no number or too small; a flag of `fit` that has no meaning here.
    """
    for flag in ("--run_dir", "--resume", "--replace"):
        if any(argument.split("=")[0] == flag for argument in arguments):
            raise UserError(f"verify-resume begins in folders of its own and continues there: leave out {flag}")
    kill = "--kill" in arguments
    if kill:
        arguments.remove("--kill")
    steps = 20
    if "--steps" in arguments:
        at = arguments.index("--steps")
        try:
            steps = int(arguments[at + 1])
        except (IndexError, ValueError):
            raise UserError("--steps needs a number of optimizer steps, like --steps 20") from None
        del arguments[at : at + 2]
    if steps < 2:
        raise UserError(f"steps is {steps}, a run that is interrupted has at least 2 (--steps)")
    return kill, steps

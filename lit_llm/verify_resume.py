"""`python -m lit_llm verify-resume`: a recipe straight and interrupted, and whether they are the same run, bit for bit.

Three processes in a temporary folder: the run straight through; the run interrupted at a random step (SIGTERM, or with
`--kill` SIGKILL); the interrupted run continued with `--resume auto`. Then every logged number, the ids of every batch, and
every tensor of the last checkpoints are compared.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.checkpoint.format import read
from lit_llm.run_folder import CHECKPOINTS

LEDGER = "samples-rank{}.jsonl"
# How fast it went and what it took differs between any two runs.
NOT_COMPARED = ("throughput/", "time/", "memory/")
CAUSES = {
    "samples": "the order of samples or the position in it was not restored (data module, loader)",
    "train/loss": "weights, optimizer state or random draws were not restored",
    "lr": "the schedule depends on something besides the step, or trainer.max_steps differed",
    "grad/norm": "gradients differ: accumulation restarted inside a step, or random draws",
    "val/loss": "validation is not over a fixed set in a fixed order",
}


class SampleLedger(Callback):
    """Writes the checksum of every micro-batch's ids, by optimizer step, to `samples-rank<r>.jsonl` in the run folder."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file = open(Path(trainer.default_root_dir) / LEDGER.format(trainer.global_rank), "a")  # noqa: SIM115  closed at the end
        self.file.write("[0, 0]\n")  # a process begins: what it makes again replaces what was made before

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        ids = batch["input_ids"].cpu().numpy().tobytes()
        self.file.write(json.dumps([trainer.global_step + 1, zlib.crc32(ids)]) + "\n")
        self.file.flush()  # so that a kill loses no line, and the parent sees how far it is

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file.close()


def ledger(run: Path, rank: int = 0) -> dict[int, list[int]]:
    """Checksums by step; a step made again after an interruption counts as it was made last."""
    steps: dict[int, list[int]] = {}
    previous = -1
    path = run / LEDGER.format(rank)
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            step, checksum = json.loads(line)
        except ValueError:
            continue  # cut by a kill
        if step != previous:
            steps[step] = []
        if step != 0:
            steps[step].append(checksum)
        previous = step
    steps.pop(0, None)
    return steps


def curves(run: Path) -> dict[str, dict[int, float]]:
    """Every logged number by name and step, except those that are about time."""
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
    last = [dict(tensors(read(run / CHECKPOINTS / "last.ckpt"))) for run in (straight, interrupted)]
    for part in ("state_dict", "optimizer_states"):
        compare(f"tensors in {part}", *({k: v for k, v in side.items() if k.startswith(part)} for side in last))
    return rows, found


def tensors(tree: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    """Every tensor in nested dicts and lists, by its path."""
    if isinstance(tree, torch.Tensor):
        return [(prefix, tree)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return [found for key, value in items for found in tensors(value, f"{prefix}.{key}" if prefix else str(key))]


def same(a: Any, b: Any) -> bool:
    """Bit for bit; NaN is NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b) or (a != a and b != b and a is not None and b is not None)


def short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "nothing" if value is None else str(value)


def launch(arguments: list[str], run: Path, steps: int, extra: list[str]) -> subprocess.Popen[str]:
    overlay = run.parent / "ledger.yaml"
    overlay.write_text("trainer: {callbacks+: [{class_path: lit_llm.verify_resume.SampleLedger}]}\n")
    fixed = ["--run_dir", str(run), "--trainer.max_steps", str(steps), "--trainer.log_every_n_steps", "1"]
    command = [sys.executable, "-m", "lit_llm", "fit", *arguments, "--config", str(overlay), *fixed, *extra]
    with open(run.parent / f"{run.name}.log", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def interrupt(process: subprocess.Popen[str], run: Path, at_step: int, signum: signal.Signals) -> None:
    """Signal the run once its ledger has reached a step; for SIGKILL every process of it, at a random moment of that step."""
    while process.poll() is None and max(ledger(run), default=0) < at_step:
        time.sleep(0.02)
    if process.poll() is not None:
        return
    if signum == signal.SIGKILL:
        time.sleep(random.random() * 0.2)
        os.killpg(process.pid, signum)  # other ranks and loader workers too
    else:
        process.send_signal(signum)
    process.wait()


def main(arguments: list[str]) -> int:
    """Print a certificate, or what differs first and the likely cause. Exit code 0 if nothing differs, else 1.

    Raises:
        ValueError: the recipe does not run, with its own messages.
    """
    arguments = list(arguments)
    if "--help" in arguments or "-h" in arguments:
        print(f"usage: python -m lit_llm verify-resume --config RECIPE [--steps N] [--kill] [any flag of fit]\n\n{__doc__}")
        return 0
    kill = "--kill" in arguments
    if kill:
        arguments.remove("--kill")
    steps = 20
    if "--steps" in arguments:
        at = arguments.index("--steps")
        try:
            steps = int(arguments[at + 1])
        except (IndexError, ValueError):
            raise ValueError("--steps needs a number of optimizer steps, like --steps 20") from None
        del arguments[at : at + 2]
    if steps < 2:
        raise ValueError(f"steps is {steps}, a run that is interrupted has at least 2 (--steps)")
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        straight, interrupted = Path(folder) / "straight", Path(folder) / "interrupted"
        if launch(arguments, straight, steps, []).wait() != 0:
            raise ValueError((Path(folder) / "straight.log").read_text()[-2000:].strip().replace("error: ", ""))
        at_step = random.randint(min(2, steps - 1), steps - 1)
        process = launch(arguments, interrupted, steps, [])
        interrupt(process, interrupted, at_step, signal.SIGKILL if kill else signal.SIGTERM)
        print(f"interrupted in step {at_step} of {steps} by {'SIGKILL' if kill else 'SIGTERM'}: exit code {process.returncode}")
        if launch(arguments, interrupted, steps, ["--resume", "auto"]).wait() != 0:
            raise ValueError((Path(folder) / "interrupted.log").read_text()[-2000:].strip().replace("error: ", ""))
        rows, found = differences(straight, interrupted)
    for name, count, different in rows:
        print(f"  {name:32s} {count:6d} compared, {different} differ")
    if found:
        print("NOT the same run:\n  " + "\n  ".join(found))
        return 1
    print("certificate: the interrupted run is the straight one, bit for bit.")
    return 0

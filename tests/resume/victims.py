"""Callbacks that these tests add to runs with `trainer.callbacks+`."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback

from lit_llm.checkpoint import crash_safe


class Hold(Callback):
    """Waits in optimizer step number `step` while `file` exists."""

    def __init__(self, step: int, file: str) -> None:
        self.step, self.file = step, Path(file)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        while trainer.global_step + 1 == self.step and self.file.exists():
            time.sleep(0.01)


class SlowValidation(Callback):
    """Waits after the first batch of the validation after one step. Records each finished batch in a file per rank."""

    def __init__(self, seconds: float, step: int, file: str) -> None:
        self.seconds, self.step, self.file = seconds, step, file

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        with open(f"{self.file}-{trainer.global_rank}", "a") as file:
            file.write(f"{trainer.global_step} {batch_idx}\n")
        if (trainer.global_step, batch_idx) == (self.step, 0):
            time.sleep(self.seconds)


class Spoil(Callback):
    """Multiplies the gradients of some optimizer steps by a factor, which can be "nan" or "inf"."""

    def __init__(self, factors: dict[int, str], forever_from: int | None = None) -> None:
        self.factors, self.forever_from = factors, forever_from

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step + 1
        factor = self.factors.get(step)
        if self.forever_from is not None and step >= self.forever_from:
            factor = "nan"
        if factor is not None:
            for parameter in pl_module.parameters():
                parameter.grad.mul_(float(factor))


class Leave(Callback):
    """Skips the update in these optimizer steps, by removing the gradients."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 in self.steps:
            for parameter in pl_module.parameters():
                parameter.grad = None


class FullDisk(Callback):
    """On one rank, the disk has no room for the checkpoints of these optimizer steps, whenever they are written."""

    def __init__(self, rank: int, steps: list[int]) -> None:
        self.rank, self.checkpoints = rank, [f"step-{step:08d}" for step in steps]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == self.rank:
            crash_safe.open = self.open  # type: ignore[attr-defined]

    def open(self, path: Path, mode: str, **options: Any) -> Any:
        if any(name in str(path) for name in self.checkpoints):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open(path, mode, **options)


def overlay(folder: Path, name: str, *callbacks: tuple[str, dict[str, Any]]) -> list[str]:
    """Flags that add callbacks of this file to a run."""
    chosen = [{"class_path": f"victims.{cls}", "init_args": arguments} for cls, arguments in callbacks]
    (folder / name).write_text(yaml.dump({"trainer": {"callbacks+": chosen}}))
    return ["--config", name]

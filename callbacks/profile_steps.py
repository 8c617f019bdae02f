"""Traces a few optimizer steps with torch.profiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ._lightning import _AfterSteps
from ._torch import start_memory_history, stop_memory_history
from .errors import UserError, setting
from .ranges import STEPS, check_ranges, whole

_SNAPSHOT_ENTRIES = 100_000  # allocations and frees in a memory snapshot, at most


class Profile(_AfterSteps):
    """Records `steps` consecutive optimizer steps with torch.profiler, each from data loading to weight update.

    Writes `<dirpath>/rank0.<first step>.pt.trace.json.gz`, for https://ui.perfetto.dev, chrome://tracing or TensorBoard with
    torch-tb-profiler. Steps are labelled `ProfilerStep#<optimizer step>`. `memory_snapshot` also writes
    `rank0.<first step>.memory.pickle`, for https://docs.pytorch.org/memory_viz. Recording makes steps slower.

    Logs: nothing.

    Contract:
        on_train_start: refuses settings that cannot be recorded; starts recording if `wait=0`.
        on_train_batch_end: starts recording after `wait` steps; stops after `steps` more and writes the file.
        on_train_end: if the run ends earlier, writes the steps recorded so far, or warns if there are none.
        on_exception: stops recording and writes no file.
        State: none: a resumed run waits and records again.

    Args:
        wait: number of this process's first optimizer steps not to record: these compile, warm up and allocate.
        steps: number of optimizer steps to record. The first recorded step includes the start of the profiler.
        all_ranks: record on every rank, one file each; otherwise on rank 0 only.
        memory_snapshot: also record every allocation of CUDA memory.
        dirpath: folder of the files; null = `<trainer.default_root_dir>/profile`.

    Raises:
        UserError: numbers out of range; `memory_snapshot` without CUDA; `Trainer(profiler="pytorch")`.
    """

    def __init__(
        self,
        wait: Annotated[int, whole(0, STEPS)] = 10,
        steps: Annotated[int, whole(1, 10_000)] = 3,
        all_ranks: bool = False,
        memory_snapshot: bool = False,
        dirpath: str | None = None,
    ) -> None:
        check_ranges(Profile, locals())
        self.wait = wait
        self.steps = steps
        self.all_ranks = all_ranks
        self.memory_snapshot = memory_snapshot
        self.dirpath = dirpath
        self._first = 0  # optimizer step
        self._profiler: profile | None = None

    def trainer_problems(self, trainer: Trainer) -> list[str]:
        """One sentence for each reason why this trainer's steps cannot be recorded."""
        problems = []
        if self.memory_snapshot and trainer.strategy.root_device.type != "cuda":
            problems.append(
                f"memory_snapshot records CUDA memory, but this run uses {trainer.strategy.root_device.type}: remove"
                f" {setting(Profile, 'memory_snapshot')}."
            )
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            problems.append(
                f"Profile and Trainer(profiler='pytorch') cannot both record: remove {setting(Trainer, 'profiler')} or"
                f" {setting(Profile)}."
            )
        return problems

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if problems := self.trainer_problems(trainer):
            raise UserError("\n".join(problems))
        super().on_train_start(trainer, pl_module)
        self._first = trainer.global_step + self.wait + 1
        if self.wait == 0:
            self._start(trainer)

    def _after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if step == self._first - 1:
            self._start(trainer)
        elif self._profiler is not None:
            if step < self._first + self.steps - 1 and step != trainer.max_steps:
                self._profiler.step()  # begins the label of the next step
            else:
                self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step >= self._first and self._profiler is not None:
            self._stop(trainer)
        elif trainer.global_step < self._first:
            self._end_recording(snapshot=None)
            rank_zero_warn(
                f"Profile recorded nothing: the run ended after step {trainer.global_step}, before step {self._first}"
                f" ({setting(Profile, 'wait')})."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end_recording(snapshot=None)

    def _start(self, trainer: Trainer) -> None:
        if not (trainer.is_global_zero or self.all_ranks):
            return
        on_cuda = trainer.strategy.root_device.type == "cuda"
        if self.memory_snapshot:
            start_memory_history(_SNAPSHOT_ENTRIES)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
        self._profiler = profile(activities=activities, record_shapes=True, schedule=lambda step: ProfilerAction.RECORD)
        self._profiler.step_num = self._first  # its labels are the numbers of the optimizer steps
        self._profiler.start()

    def _stop(self, trainer: Trainer) -> None:
        folder = Path(self.dirpath or Path(trainer.default_root_dir) / "profile")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{trainer.global_rank}.{self._first}"
        profiler = self._profiler
        assert profiler is not None
        self._end_recording(snapshot=folder / f"{name}.memory.pickle")
        partial, trace = folder / f".{name}.json.gz", folder / f"{name}.pt.trace.json.gz"
        profiler.export_chrome_trace(str(partial))
        os.replace(partial, trace)
        rank_zero_info(f"Profile: {trace}")

    def _end_recording(self, snapshot: Path | None) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()  # waits for the device
        self._profiler = None
        if self.memory_snapshot:
            stop_memory_history(snapshot)

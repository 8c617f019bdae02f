"""Locks the run folder while a launch trains, and restores the folder if the launch fails before its first step ends."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_llm.checkpoint.disk_format import clear_leftovers
from lit_llm.core.disk import delete, is_disk_error, set_aside, write_bytes
from lit_llm.runs.lock import LOCK
from lit_llm.runs.plan_record import PLAN
from lit_llm.runs.resume import RunStart
from lit_llm.runs.run_folder import CHECKPOINTS, CONFIG, LOGGER_RUNS
from lit_llm.runs.tokenizer_files import COMPANIONS
from lit_llm.tokenizers import TOKENIZER_FILE

_WRITTEN = {CONFIG, TOKENIZER_FILE, *COMPANIONS, "hparams.yaml", PLAN, LOGGER_RUNS}
"""Names of files that a launch writes into a run folder before the first step, in addition to TensorBoard's event file."""


class FolderGuard(Callback):
    """On rank 0, owns the lock of the run folder during training, and can restore the folder if the launch makes no step.

    Contract:
        on_train_batch_start: sets `training_began` to True.
        on_save_checkpoint: checks that this process still owns the lock.
        State: none.

    Args:
        start: the start of the run. Its attribute `lock` is the lock of the folder, which `held` acquires.
        replace: whether an existing run folder is renamed, so that the run begins in a new folder.
    """

    def __init__(self, run_dir: Path, start: RunStart, *, replace: bool) -> None:
        self.run_dir, self.start, self.replace = run_dir, start, replace
        self.training_began = False
        self._existed = False
        self._aside: Path | None = None
        self._names: set[str] = set()
        self._contents: dict[Path, bytes] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.training_began = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        assert self.start.lock is not None
        self.start.lock.check()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager: owns the run folder's lock. On entry, sets an old folder aside if `replace`, and records files.

        Raises:
            UserError: Another process owns the lock.
        """
        self._existed, lock = self.run_dir.exists(), self.start.lock
        assert lock is not None
        with lock:
            if self._existed and self.replace:
                self._aside, self._existed = set_aside(self.run_dir), False
                lock.acquire()  # in the new folder
                assert self._aside is not None
                delete(self._aside / LOCK)
            clear_leftovers(self.run_dir / CHECKPOINTS)  # a run that has ended saves no more
            if self._existed:
                self._names = {path.name for path in self.run_dir.iterdir()}
                self._contents = {self.run_dir / name: (self.run_dir / name).read_bytes() for name in self._names & _WRITTEN}
            yield

    def is_where(self, error: OSError) -> bool:
        """Whether `error`, raised while the run wrote files, is about a file in the run folder.

        An error of the system call `write` names no file. It counts as one of the run folder if the disk caused it.
        """
        if error.filename is None:
            return is_disk_error(error)
        return Path(os.fsdecode(error.filename)).absolute().is_relative_to(self.run_dir.absolute())

    def restore(self) -> None:
        """Delete the files that this launch wrote, and write back the contents of files that it overwrote.

        A folder that this launch made is deleted, unless it has checkpoints, and a renamed old folder gets its name back.
        """
        if not self._existed:
            if not (self.run_dir / CHECKPOINTS).exists():
                shutil.rmtree(self.run_dir, ignore_errors=True)
                if self._aside is not None:
                    self._aside.rename(self.run_dir)
            return
        for path in self.run_dir.iterdir():
            if path.name not in self._names and (path.name in _WRITTEN or path.name.startswith("events.out.tfevents.")):
                delete(path)
        for path, content in self._contents.items():
            with contextlib.suppress(OSError):  # a disk that refuses this has refused the launch's file, too
                write_bytes(path, content)

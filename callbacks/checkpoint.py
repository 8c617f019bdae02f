"""Checkpoints at optimizer steps: the last few, the last one, and the best."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor


class StepCheckpoint(Checkpoint):
    """Saves `step-00000500.ckpt`, … and keeps the relative links `last.ckpt` and `best.ckpt` pointing at two of them.

    Saved, always between two optimizer steps and through `trainer.save_checkpoint`:
        - every `every_n_steps` optimizer steps. Where validation follows the step, after it, so that the file knows its
          result: resumed from a file saved before, a run skips that validation (row, EarlyStopping, best);
        - the best by `monitor`, after a validation that improved on it;
        - the end of training.
    Kept: the newest `keep_last`, the best. An older file is deleted only after the next one is saved, never what a link
    points to, and never a file that this run (with the parts it resumed from) did not write.

    Stops in the middle of an accumulation window (a Timer, a callback setting `trainer.should_stop`) are put off to
    its end: the gradients of half a window are in no checkpoint.

    Logs: nothing.

    Contract:
        setup: resolves the folder.
        on_train_start: drops from the restored state what is not in the folder (a run branched into a new one starts
            its own best). The step resumed from counts as saved.
        on_train_batch_end: periodic saves.
        on_validation_end: periodic saves that waited for it, and the best; not in the sanity check, only while fitting.
        on_train_end: saves the last step if it is not saved.
        State: score and file name of the best, names of the files kept; plain types.
    All ranks enter every save; rank 0 alone decides what is best, links and deletes. `fast_dev_run` saves nothing.

    Args:
        every_n_steps: optimizer steps between two saves.
        keep_last: number of newest files kept, at least 1; the best is kept besides.
        monitor: metric that says which is best; null = no best.
        mode: whether the best is the smallest or the largest. NaN and infinities are never best.
        dirpath: a local folder; null = `<trainer.default_root_dir>/checkpoints`.

    Raises:
        ValueError: numbers out of range; a remote folder; after a validation, `monitor` is not among the metrics.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        keep_last: int = 2,
        monitor: str | None = "val/loss",
        mode: Literal["min", "max"] = "min",
        dirpath: str | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps} but must be >= 1 (--checkpoint.every_n_steps).")
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last} but must be >= 1 (--checkpoint.keep_last).")
        if mode not in ("min", "max"):
            raise ValueError(f"mode is {mode!r} but must be 'min' or 'max' (--checkpoint.mode).")
        if dirpath is not None and "://" in str(dirpath):
            raise ValueError(f"dirpath is {dirpath} but links need a local folder (--checkpoint.dirpath).")
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self.monitor = monitor
        self.mode = mode
        self.dirpath = dirpath
        self._folder = Path()
        self._best_score: float | None = None
        self._best_name = ""  # file names, not paths: a run folder may be moved
        self._kept: list[str] = []  # oldest first
        self._seen_step = 0  # the hook runs once a micro-batch, its work is done once a step
        self._saved_step = 0
        self._due = False  # a periodic save is waiting for the validation that follows
        self._stop_at_boundary = False
        self._warned = False

    @property
    def best_model_path(self) -> str:
        """Path of the best file, "" while there is none."""
        return str(self._folder / self._best_name) if self._best_name else ""

    @property
    def best_model_score(self) -> Tensor | None:
        """Value of `monitor` in the best file."""
        return None if self._best_score is None else torch.tensor(self._best_score)

    @property
    def last_model_path(self) -> str:
        """Path of the newest file, "" while there is none."""
        return str(self._folder / self._kept[-1]) if self._kept else ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Absolute, so that a later chdir does not move it.
        self._folder = Path(self.dirpath or Path(trainer.default_root_dir) / "checkpoints").absolute()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        present = [name for name in {*self._kept, self._best_name} if name and (self._folder / name).exists()]
        present = trainer.strategy.broadcast(present)  # one rank looks: the folder may not be visible to all at once
        self._kept = [name for name in self._kept if name in present]
        if self._best_name not in present:
            self._best_name, self._best_score = "", None
        self._seen_step = self._saved_step = trainer.global_step
        self._due = self._stop_at_boundary = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._should_accumulate():
            if trainer.should_stop:
                trainer.should_stop, self._stop_at_boundary = False, True
            return
        if self._stop_at_boundary:
            trainer.should_stop, self._stop_at_boundary = True, False
        step = trainer.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        if step % self.every_n_steps == 0:
            if _validation_follows(trainer):
                self._due = True
            else:
                self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        if trainer.fit_loop._should_accumulate():
            if not self._warned:
                rank_zero_warn(
                    "Validation ran between two optimizer steps, where no checkpoint can be saved, so it does not count"
                    " for best.ckpt: validate every so many optimizer steps instead (callbacks.ValidateEvery)."
                )
            self._warned = True
            return
        if self._improved(trainer) or self._due:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == self._saved_step:
            return
        if trainer.fit_loop._should_accumulate():
            rank_zero_warn(
                f"Training was stopped between two optimizer steps, after step {trainer.global_step}, which is not"
                f" saved: the newest checkpoint is {self.last_model_path or 'none'}."
            )
            return
        self._save(trainer)
        trainer.strategy.barrier("StepCheckpoint.on_train_end")  # whoever looks next finds the links in place

    def _improved(self, trainer: Trainer) -> bool:
        """Whether the validation just run is the best so far; if so record it: the save that follows must contain
        it."""
        if self.monitor is None:
            return False
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            there = ", ".join(sorted(metrics)) or "none"
            raise ValueError(
                f"StepCheckpoint monitors {self.monitor!r} but validation did not log it; logged are: {there}"
                " (--checkpoint.monitor, null for no best checkpoint)."
            )
        # Rank 0's value for all: a metric logged without sync_dist differs, and ranks that disagree would wait for
        # ever.
        score = trainer.strategy.broadcast(float(metrics[self.monitor]))
        if not math.isfinite(score):
            return False
        if self._best_score is not None and not (score < self._best_score if self.mode == "min" else score > self._best_score):
            return False
        self._best_score, self._best_name = score, _file_name(trainer.global_step)
        return True

    def _save(self, trainer: Trainer) -> None:
        """Save this step, link it, delete what is no longer kept. All ranks."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        step = trainer.global_step
        name = _file_name(step)
        self._due = False
        newest_last = [*(kept for kept in self._kept if kept != name), name]
        keep = set(newest_last[-self.keep_last :]) | {self._best_name}
        # Before saving: the file names itself and its neighbours.
        self._kept = [kept for kept in newest_last if kept in keep]
        # It ends with a barrier: afterwards every rank's part is written.
        trainer.save_checkpoint(self._folder / name)
        self._saved_step = step
        if trainer.is_global_zero:
            self._link("last.ckpt", name)
            if self._best_name:
                self._link("best.ckpt", self._best_name)
        for old in newest_last:
            if old not in keep:
                trainer.strategy.remove_checkpoint(self._folder / old)  # rank 0; file or folder, as the strategy saves

    def _link(self, link: str, target: str) -> None:
        """Point `link` at `target`, both in the folder, in one step: a reader finds the old file or the new one."""
        temporary = self._folder / f"{link}.tmp"
        temporary.unlink(missing_ok=True)  # left by a killed process
        temporary.symlink_to(target)
        os.replace(temporary, self._folder / link)

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self._best_score, "best_name": self._best_name, "kept": list(self._kept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best_score = state_dict["best_score"]
        self._best_name = state_dict["best_name"]
        self._kept = list(state_dict["kept"])


def _file_name(step: int) -> str:
    return f"step-{step:08d}.ckpt"


def _validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning will validate right after this on_train_batch_end: its own test, asked one call earlier."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return loop._should_check_val_fx(fetcher) and sum(loop.val_loop.max_batches) > 0

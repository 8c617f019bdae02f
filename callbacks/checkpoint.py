"""Saves checkpoints at optimizer steps, and keeps the newest few, the best, and some permanently."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
import zipfile
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ._lightning import _AfterSteps, accumulates, metric_step, validation_follows
from .contracts import AsksToSave, KnowsStableStep, SavesInBackground, is_score, offered
from .errors import UserError, refused, setting
from .ranges import STEPS, above, check_ranges, whole

_LOSSES = ("val/loss", "val_loss", "valid/loss", "valid_loss", "validation/loss", "validation_loss", "eval/loss", "eval_loss")
"""Usual metric names of the validation loss."""


class _Files(NamedTuple):
    """Record of the checkpoint files of a run. File names have no folder, because the run folder may be moved."""

    best_score: float | None = None
    best_name: str = ""
    kept: tuple[str, ...] = ()  # oldest first; other files are never touched unless this run wrote them
    permanent: tuple[str, ...] = ()  # the files of `kept` that are never deleted
    leaving: tuple[str, ...] = ()  # files to delete once the checkpoint that contains this list is on disk


class StepCheckpoint(_AfterSteps, Checkpoint):
    """Saves `step-00000500.ckpt`, … and keeps the relative links `last.ckpt`, `best.ckpt` and `stable.ckpt`.

    Saves happen between two optimizer steps and through `trainer.save_checkpoint`:
        - every `every_n_steps` optimizer steps, every `keep_every_n_steps`, and when `every_n_minutes` have passed since the
          last save. If validation follows the step, the save comes after it: a resumed run would not repeat the validation;
        - when the metric `monitor`, of validation or tasks, improves. Only a value measured at the saved step counts;
        - at the step in the attribute `stable_until` of another callback (WSD: the last step before its decay);
        - when another callback's attribute `save_now` is true: at once, because after a signal there is no time to validate;
        - at the end of training.
    The newest `keep_last` files and the best file are kept, and forever the files of `keep_every_n_steps` and `stable_until`.
    An older file is deleted only after the next file is on disk. This callback never deletes the target of a link, or a file
    that neither this run nor a run it resumed from wrote.

    Rank 0 makes links and deletions after the save has succeeded. If the trainer's CheckpointIO has a method `finished`
    (`contracts.py`), rank 0 calls it after every micro-batch to learn this. Otherwise, rank 0 tests that the file exists and is
    complete: Lightning may return from a save without an error although the disk refused permission.

    A stop in the middle of an accumulation window (a Timer, a callback that sets `trainer.should_stop`) is delayed to the
    end of the window, because a checkpoint does not contain the gradients of half a window.

    Logs: nothing.

    Contract:
        setup: resolves the folder.
        on_train_start: forgets files of the restored state that are not in the folder (so a branch has its own best); makes
            the links and deletions that a killed process did not make. The resumed step counts as saved.
        on_train_batch_end: makes due saves; links and deletes after a finished save.
        on_validation_end: in `fit`, makes the save that waited for validation, and saves a new best. In the sanity check, only
            looks for `monitor`.
        on_validation_interrupted (called by StopOnSignal): saves the step, unless it is already saved.
        on_train_end: saves the last step, unless it is already saved, and waits until it is on disk.
        on_exception: waits for a save in progress.
        on_fit_end: makes the repairs of on_train_start, if the resumed run had no step left.
        State: score and name of the best file, names of the files kept and of the files to be deleted; plain types.
    All ranks take part in every save. Rank 0 decides which file is the best, reads the clock, and makes links and deletions.
    With `fast_dev_run` nothing is saved.

    For the calling program: `last_save_failed`, after `fit`, is whether the last checkpoint could not be written.

    Args:
        every_n_steps: optimizer steps between two saves.
        keep_last: number of newest files kept, at least 1. The best file is kept in addition.
        monitor: metric of validation, or of tasks, that determines the best checkpoint; null = no best. If validation does not
            log this metric, a warning says so, before the first step if there is a sanity check. For a validation loss, other
            usual names of this loss are tried, such as val_loss.
        mode: whether the smallest or the largest value is best. NaN and infinity are never best.
        dirpath: a local folder; null = `<trainer.default_root_dir>/checkpoints`. The command `fit` takes only null.
        every_n_minutes: also save when this many minutes have passed since the last save; null = off. The save may be a few
            steps late, because a collective tells the ranks the time, and not at every step.
        keep_every_n_steps: optimizer steps between two files that are never deleted; null = none.

    Raises:
        UserError: numbers out of range; a remote folder.
    """

    def __init__(
        self,
        every_n_steps: Annotated[int, whole(1, STEPS)] = 1000,
        keep_last: Annotated[int, whole(1, 10**6)] = 2,
        monitor: str | None = "val/loss",
        mode: Literal["min", "max"] = "min",
        dirpath: str | None = None,
        every_n_minutes: Annotated[float | None, above(0, 10**6)] = None,
        keep_every_n_steps: Annotated[int | None, whole(1, STEPS)] = None,
    ) -> None:
        check_ranges(StepCheckpoint, locals())
        if dirpath is not None and "://" in str(dirpath):
            raise UserError(refused(StepCheckpoint, "dirpath", f"is {dirpath}, but links need a local folder"))
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self.monitor = monitor
        self.mode = mode
        self.dirpath = dirpath
        self.every_n_minutes = every_n_minutes
        self.keep_every_n_steps = keep_every_n_steps
        self.last_save_failed = False
        self._folder = Path()
        self._files = _Files()
        self._saving: _Files | None = None  # the run's files once the save in progress is on disk; its own is the newest
        self._restored = False  # whether the files are those of a checkpoint that is resumed
        self._stable_step = 0
        self._saved_step = 0  # step and time of the last save begun
        self._saved_at = 0.0
        self._look_at_clock = 0  # the next step at which the ranks compare the time with every_n_minutes
        self._due = False  # a save waits for the validation that follows
        self._stop_at_boundary = False
        self._repaired = False  # whether this fit has repaired the folder
        self._warned = self._told = self._told_of_links = False

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint file; "" before the first best file."""
        return str(self._folder / self._files.best_name) if self._files.best_name else ""

    @property
    def best_model_score(self) -> Tensor | None:
        """Value of `monitor` for the best checkpoint file, as a 0-d tensor; None before the first best file."""
        return None if self._files.best_score is None else torch.tensor(self._files.best_score)

    @property
    def last_model_path(self) -> str:
        """Path of the newest checkpoint file; "" before the first file."""
        return str(self._folder / self._files.kept[-1]) if self._files.kept else ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Absolute, so that a later chdir does not move it.
        self._folder = Path(self.dirpath or Path(trainer.default_root_dir) / "checkpoints").absolute()
        self._repaired = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._saving, self.last_save_failed = None, False
        known = (offered(callback, KnowsStableStep) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        self._stable_step = next((schedule.stable_until for schedule in known if schedule), 0)
        self._repair(trainer)
        self._files = trainer.strategy.broadcast(self._files)  # on a network file system, other ranks may see the folder later
        self._saved_step = trainer.global_step
        self._saved_at, self._look_at_clock = time.monotonic(), 0
        self._due = self._stop_at_boundary = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._saving is not None and trainer.is_global_zero:
            self._settle(trainer, wait=False)
        if accumulates(trainer):
            if trainer.should_stop:
                trainer.should_stop, self._stop_at_boundary = False, True
            return
        if self._stop_at_boundary:
            trainer.should_stop, self._stop_at_boundary = True, False
        super().on_train_batch_end(trainer, pl_module)

    def _after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        score = self._improved_task_score(trainer)
        asking = (offered(callback, AsksToSave) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        at_once = any(callback.save_now for callback in asking if callback)
        due = step % self.every_n_steps == 0 or self._is_permanent(step) or self._minutes_are_over(trainer, step)
        if at_once or due or score is not None:
            # If an immediate save is followed by validation, the step is saved again, which replaces the first file.
            self._due = validation_follows(trainer)
            if at_once or not self._due:
                self._save(trainer, score)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if trainer.sanity_checking:
            self._metric(trainer)
            return
        if accumulates(trainer):
            if not self._warned:
                rank_zero_warn(
                    "Validation ran inside an accumulation window, where a checkpoint cannot be saved, so best.ckpt ignores"
                    " it: validate after whole optimizer steps (callbacks.ValidateEvery)."
                )
            self._warned = True
            return
        score = self._improved_score(trainer)
        if score is not None or self._due:
            self._due = False
            self._save(trainer, score)

    def on_validation_interrupted(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save this step, unless it is saved. StopOnSignal, not Lightning, calls this, after it interrupts a validation."""
        if trainer.global_step != self._saved_step and not accumulates(trainer):
            self._due = False
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not accumulates(trainer):  # else the module has stopped within a step, whose gradients no checkpoint has
            score = self._improved_task_score(trainer)  # `TaskScores` may have just made it
            if trainer.global_step != self._saved_step or score is not None:
                self._save(trainer, score)
        self._settle_together(trainer)  # code after fit finds the links on any rank

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero:  # no collective: other ranks may not reach it
            self._settle(trainer, wait=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._repaired:  # resumed at the last step: no step is left, so Lightning has not called on_train_start
            self._repair(trainer)
            trainer.strategy.checkpoint_io.teardown()  # the strategy's own teardown is over; waits for a deletion in a thread

    def _is_permanent(self, step: int) -> bool:
        return step == self._stable_step or (self.keep_every_n_steps is not None and step % self.keep_every_n_steps == 0)

    def _minutes_are_over(self, trainer: Trainer, step: int) -> bool:
        """Whether every_n_minutes have passed since the last save, by rank 0's clock, which is not read at every step.

        Rank 0 broadcasts the answer, which takes time. So this sets `_look_at_clock`, the step of the next broadcast, about
        halfway to the step at which the minutes will be over at the pace since the last save. Returns False until then.
        """
        if self.every_n_minutes is None or step < self._look_at_clock:
            return False
        elapsed, steps = time.monotonic() - self._saved_at, step - self._saved_step
        left = self.every_n_minutes * 60 - elapsed
        halfway = int(left / 2 * steps / elapsed) if elapsed > 0 else 0
        # At most as many steps ahead as were timed: on a GPU the first steps after a save only queue work and look fast.
        over, wait = trainer.strategy.broadcast((left <= 0, max(1, min(halfway, steps))))
        self._look_at_clock = step + wait
        return over

    def _improved_task_score(self, trainer: Trainer) -> float | None:
        """The value of `monitor`, if it is a task's score, measured at this step and better than the best file's; else None."""
        scored = metric_step(trainer, self.monitor) == trainer.global_step and is_score(trainer, self.monitor)
        return self._improved_score(trainer) if scored else None

    def _improved_score(self, trainer: Trainer) -> float | None:
        """The value of `_metric`, if measured at this step and better than the best file's value; else None. A collective."""
        if self.monitor is None:
            return None
        metric = self._metric(trainer)
        made_in = trainer.global_step if metric is None else metric_step(trainer, metric)
        if made_in not in (None, trainer.global_step):  # None: with `self.log`, in the validation that has just ended
            return None
        best = (self._saving or self._files).best_score
        score = math.nan if metric is None else float(trainer.callback_metrics[metric])
        improved = best is None or (score < best if self.mode == "min" else score > best)
        # Use rank 0's score everywhere: a metric logged without sync_dist differs between ranks, which would deadlock.
        return trainer.strategy.broadcast(score if improved and math.isfinite(score) else None)

    def _metric(self, trainer: Trainer) -> str | None:
        """Name of the metric that determines the best file: `monitor`, or another usual name of the loss. None: none is logged.

        Warns once if the returned name is not `monitor`.
        """
        metrics = trainer.callback_metrics
        names = (self.monitor, *(_LOSSES if self.monitor in _LOSSES else ()))
        metric = next((name for name in names if name in metrics), None)
        if metric != self.monitor and not self._told and not is_score(trainer, self.monitor):
            there = ", ".join(sorted(metrics)) or "none"
            follows = f"the best checkpoint follows {metric!r}" if metric else "without it no checkpoint is the best"
            rank_zero_warn(
                f"StepCheckpoint monitors {self.monitor!r} but validation did not log it; {follows}. Logged are: {there}"
                " (monitor of StepCheckpoint; null for no best checkpoint)."
            )
            self._told = True
        return metric

    def _save(self, trainer: Trainer, best_score: float | None = None) -> None:
        """Save a checkpoint of this step, as the new best if `best_score` is given. Called on all ranks."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._settle_together(trainer)
        step = trainer.global_step
        known = {*self._files.kept, *self._files.permanent}
        self._saving = self._plan(step, best_score)  # before saving, because the checkpoint contains this list
        target = self._folder / self._saving.kept[-1]
        if offered(trainer.strategy.checkpoint_io, SavesInBackground) is None and target.name not in known and target.exists():
            rank_zero_warn(f"{target} was there before this run and is replaced ({setting(StepCheckpoint, 'dirpath')}).")
        self._saved_step, self._saved_at, self._look_at_clock = step, time.monotonic(), 0
        try:
            trainer.save_checkpoint(target, weights_only=False)  # the default, of which Lightning tells; ends with a barrier
        except BaseException:
            self._saving = None
            raise
        if trainer.is_global_zero:
            self._settle(trainer, wait=False)

    def _plan(self, step: int, best_score: float | None) -> _Files:
        """The run's files as they will be once this step is saved. If `best_score` is given, this step is the new best."""
        old, name = self._files, _name(step)
        newest_last = [*(kept for kept in old.kept if kept != name), name]
        best = (old.best_score, old.best_name) if best_score is None else (best_score, name)
        keep = {*newest_last[-self.keep_last :], best[1]}
        kept = tuple(kept for kept in newest_last if kept in keep)
        permanent = {*old.permanent, name} if self._is_permanent(step) else {*old.permanent}
        leaving = tuple(gone for gone in old.kept if gone not in kept and gone not in permanent)
        return _Files(*best, kept, tuple(name for name in kept if name in permanent), leaving)

    def _settle(self, trainer: Trainer, *, wait: bool) -> None:
        """If the save in progress has ended, set `last_save_failed`, and after a success update links and files. On rank 0."""
        if self._saving is None:
            return
        saved = self._is_saved(trainer, self._folder / self._saving.kept[-1], wait=wait)
        if saved is None:
            return
        files, self._saving = self._saving, None
        self.last_save_failed = not saved
        if saved:
            self._files = files
            self._link_and_remove(trainer, files)

    def _is_saved(self, trainer: Trainer, path: Path, *, wait: bool) -> bool | None:
        """Whether the save to `path` has succeeded; None: it is in progress. `wait`: first wait. May warn. Called on rank 0."""
        plugin = trainer.strategy.checkpoint_io
        if (background := offered(plugin, SavesInBackground)) is not None:
            return background.finished(path, wait=wait)
        in_thread = isinstance(plugin, AsyncCheckpointIO)
        if in_thread and wait:
            with contextlib.suppress(Exception):  # Lightning raises it again
                plugin.teardown()  # waits for the thread; the next save starts another
        if _is_complete(path):
            return True
        if in_thread and not wait:
            return None
        rank_zero_warn(f"{path} was not written, so older checkpoints are kept.")
        return False

    def _link_and_remove(self, trainer: Trainer, files: _Files) -> None:
        """Point the links at `files`, delete the files in `files.leaving`. Called on rank 0 when the new file is on disk."""
        stable = [name for name in files.permanent if name == _name(self._stable_step)]
        links = {"last.ckpt": files.kept[-1:], "best.ckpt": [files.best_name], "stable.ckpt": stable}
        for link, targets in links.items():
            for target in filter(None, targets):
                self._link(link, target)
        for name in files.leaving:
            if (self._folder / name).exists():
                trainer.strategy.remove_checkpoint(self._folder / name)  # a file or a folder, depending on the strategy

    def _repair(self, trainer: Trainer) -> None:
        """Make, on rank 0, the links and deletions that a killed process did not make. Forget files missing in the folder."""
        if self._restored and Path(str(trainer.ckpt_path)).parent.resolve() != self._folder.resolve():
            self._files = _Files()  # files of these names in this folder are others
        self._repaired, self._restored, leaving, self._files = True, False, self._files.leaving, self._present()
        if trainer.is_global_zero:
            self._link_and_remove(trainer, self._files._replace(leaving=leaving))

    def _settle_together(self, trainer: Trainer) -> None:
        """Wait for the save in progress, let rank 0 update links and files, and broadcast the outcome. Called on all ranks."""
        if trainer.is_global_zero:
            self._settle(trainer, wait=True)
        self._files, self.last_save_failed = trainer.strategy.broadcast((self._files, self.last_save_failed))
        self._saving = None

    def _present(self) -> _Files:
        """A copy of `self._files` without the files that no longer exist in the folder. `self._files` is not changed."""
        old = self._files
        there = {name for name in {*old.kept, old.best_name} if name and (self._folder / name).exists()}
        best = (old.best_score, old.best_name) if old.best_name in there else (None, "")
        return _Files(*best, *(tuple(name for name in names if name in there) for names in (old.kept, old.permanent)))

    def _link(self, link: str, target: str) -> None:
        """Point `link` at `target` atomically: a reader finds the old target or the new target. A correct link is left alone.

        If the link cannot be made (the file system has no links, no inode is left, or a folder has its name), there is one
        warning, and training continues: no resume needs a link.
        """
        temporary = self._folder / f"{link}.tmp"
        try:
            temporary.unlink(missing_ok=True)  # left by a killed process
            if (self._folder / link).is_symlink() and os.readlink(self._folder / link) == target:
                return
            temporary.symlink_to(target)
            os.replace(temporary, self._folder / link)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._told_of_links:
                rank_zero_warn(
                    f"{self._folder / link} cannot be made a link to {target}: {error.strerror}. Name the checkpoint itself."
                )
            self._told_of_links = True

    def state_dict(self) -> dict[str, Any]:
        # During a save: the state after the save. It is read only from a file that was completely written.
        files = self._saving or self._files
        return {name: list(value) if isinstance(value, tuple) else value for name, value in files._asdict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        names = [tuple(state_dict.get(kind, ())) for kind in ("kept", "permanent", "leaving")]
        for name in (*filter(None, [state_dict["best_name"]]), *itertools.chain(*names)):
            if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(".ckpt"):
                raise UserError(f"the checkpoint lists {name!r} among its files, which is no checkpoint beside it")
        best = state_dict["best_score"]
        self._files = _Files(None if best is None else float(best), state_dict["best_name"], *names)
        self._restored = True


def _name(step: int) -> str:
    return f"step-{step:08d}.ckpt"


def _is_complete(path: Path) -> bool:
    """Whether `path` is a folder or a complete file. torch.save writes a ZIP archive, whose directory is at the file's end."""
    if not path.is_file():
        return path.exists()
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    return not is_archive or zipfile.is_zipfile(path)

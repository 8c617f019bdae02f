"""Validation by optimizer steps."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from ._lightning import accumulates, check_after_validation, resumed_before_validation, validate_when_resuming
from .errors import ConfigurationError


class ValidateEvery(Callback):
    """Runs validation every `every_n_steps` optimizer steps and after the very last one.

    `Trainer(val_check_interval)` counts micro-batches, so its meaning changes with gradient accumulation, and it
    misses the end of a run that is no multiple of it. Here validation always falls on an optimizer-step boundary.

    How: Lightning validates after micro-batch i when `(i + 1) % trainer.val_check_batch == 0`. This callback sets
    `val_check_batch` to 1 for the micro-batches after which validation is due and to a huge number for all others.
    A run that stops early (`trainer.should_stop`) is validated by Lightning itself, as always. `limit_val_batches=0`
    turns validation off.

    Logs: nothing.

    Contract:
        setup: refuses a second source of validation; makes EarlyStopping check after validation.
        on_train_start: answers whether validation was due at the step resumed from: Lightning then knows that a
            checkpoint saved at the end of a validation need not run it again. One saved after that step, but before its
            validation, is validated before training goes on (Lightning would leave it out).
        on_train_batch_start: decides for this micro-batch.
        State: none, a pure function of the step.

    Args:
        every_n_steps: optimizer steps between two validations.

    Raises:
        ConfigurationError: every_n_steps < 1; `Trainer(val_check_interval)` or `check_val_every_n_epoch` is set.
    """

    def __init__(self, every_n_steps: int) -> None:
        if every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps} but must be >= 1 (--validation.every_n_steps).")
        self.every_n_steps = every_n_steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        interval = getattr(trainer, "val_check_interval", "a time")  # Lightning sets no attribute for a time
        if interval != 1.0:
            raise ConfigurationError(
                f"Trainer(val_check_interval={interval}) and ValidateEvery({self.every_n_steps}) both"
                " say when to validate: remove --trainer.val_check_interval."
            )
        if trainer.check_val_every_n_epoch not in (1, None):
            raise ConfigurationError(
                f"Trainer(check_val_every_n_epoch={trainer.check_val_every_n_epoch}) and ValidateEvery("
                f"{self.every_n_steps}) both say when to validate: remove --trainer.check_val_every_n_epoch."
            )
        trainer.check_val_every_n_epoch = None
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # An EarlyStopping set up before us took check_val_every_n_epoch=1 to mean "look at the end of the epoch",
            # which for a run that is one long epoch is never. Set up after us it decides rightly by itself.
            if check_after_validation(callback):
                rank_zero_info("ValidateEvery: EarlyStopping looks after each validation, not at epoch ends.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        due = step > 0 and self._due(trainer, step)
        self._set(trainer, due=due)
        if due and resumed_before_validation(trainer):
            validate_when_resuming(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        completes_a_step = not accumulates(trainer)
        self._set(trainer, due=completes_a_step and self._due(trainer, trainer.global_step + 1))

    def _due(self, trainer: Trainer, step: int) -> bool:
        if step % self.every_n_steps == 0 or step == trainer.max_steps:
            return True
        max_epochs = trainer.max_epochs  # the other way to end: the data of the last epoch run out
        return max_epochs is not None and max_epochs != -1 and trainer.is_last_batch and trainer.current_epoch + 1 >= max_epochs

    @staticmethod
    def _set(trainer: Trainer, *, due: bool) -> None:
        trainer.val_check_batch = 1 if due else sys.maxsize

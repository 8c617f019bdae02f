"""Runs validation every so many optimizer steps, not micro-batches."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from ._lightning import accumulates, check_after_validation, validate_when_resuming
from .errors import UserError, setting, without
from .ranges import STEPS, check_ranges, whole


class ValidateEvery(Callback):
    """Runs validation every `every_n_steps` optimizer steps and after the last step.

    `Trainer(val_check_interval)` counts micro-batches, so its meaning changes with gradient accumulation, and it does not
    validate at the end of a run whose length is not a multiple of the interval.

    Method: Lightning validates after micro-batch i if `(i + 1) % trainer.val_check_batch == 0`. This callback sets
    `val_check_batch` to 1 if validation is due after the micro-batch, and otherwise to a huge number. Lightning still validates
    a run that stops early.

    Logs: nothing.

    Contract:
        setup: refuses other settings that trigger validation; makes EarlyStopping check after validation.
        on_train_start: sets `val_check_batch` for the resumed step, so that Lightning does not repeat a validation made before
            the checkpoint. If the checkpoint was saved before its step's validation, this validation runs first.
        on_train_batch_start: sets `val_check_batch` for this micro-batch.
        State: none; a pure function of the step.

    Args:
        every_n_steps: optimizer steps between two validations.

    Raises:
        UserError: every_n_steps < 1; `Trainer(val_check_interval)` or `check_val_every_n_epoch` is set.
    """

    def __init__(self, every_n_steps: Annotated[int, whole(1, STEPS)]) -> None:
        check_ranges(ValidateEvery, locals())
        self.every_n_steps = every_n_steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        interval = getattr(trainer, "val_check_interval", "a time")  # Lightning does not set the attribute for a time interval
        if interval != 1.0:
            raise UserError(
                f"Trainer(val_check_interval={interval}) conflicts with ValidateEvery({self.every_n_steps}):"
                f" remove {setting(Trainer, 'val_check_interval')}, or {without(type(self))}."
            )
        if trainer.check_val_every_n_epoch not in (1, None):
            raise UserError(
                f"Trainer(check_val_every_n_epoch={trainer.check_val_every_n_epoch}) conflicts with"
                f" ValidateEvery({self.every_n_steps}): remove {setting(Trainer, 'check_val_every_n_epoch')}."
            )
        trainer.check_val_every_n_epoch = None
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # With check_val_every_n_epoch=1, an EarlyStopping set up before this callback checks at the end of the epoch,
            # which a run of one long epoch never reaches. One set up later sees None and checks after validation.
            if check_after_validation(callback):
                rank_zero_info("ValidateEvery: EarlyStopping checks after each validation, not at the end of an epoch.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        due = step > 0 and self._due(trainer, step)
        self._set(trainer, due=due)
        if due and trainer.fit_loop.epoch_loop.restarted_on_train_batch_end:  # saved before the validation of its step
            validate_when_resuming(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        completes_a_step = not accumulates(trainer)
        self._set(trainer, due=completes_a_step and self._due(trainer, trainer.global_step + 1))

    def _due(self, trainer: Trainer, step: int) -> bool:
        if step % self.every_n_steps == 0 or step == trainer.max_steps:
            return True
        max_epochs = trainer.max_epochs  # a run also ends with the last batch of the last epoch
        return max_epochs is not None and max_epochs != -1 and trainer.is_last_batch and trainer.current_epoch + 1 >= max_epochs

    @staticmethod
    def _set(trainer: Trainer, *, due: bool) -> None:
        trainer.val_check_batch = 1 if due else sys.maxsize

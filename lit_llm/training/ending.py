"""The reason why training ended, and a check of EarlyStopping."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer

from lit_llm import callbacks
from lit_llm.errors import UserError


class RequireMonitor(Callback):
    """Raises if the metric of an EarlyStopping does not exist. Must precede it directly in `trainer.callbacks`.

    Contract:
        on_validation_end, on_train_epoch_end: checks in the hook that the EarlyStopping uses: after validation with a
            ValidateEvery, else at the end of an epoch.
        State: none.
    """

    def __init__(self, early_stopping: EarlyStopping) -> None:
        self.early_stopping = early_stopping

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit" and _validates_by_steps(trainer):
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not _validates_by_steps(trainer):
            self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        monitor, metrics = self.early_stopping.monitor, trainer.callback_metrics
        if monitor not in metrics:
            raise UserError(
                f"EarlyStopping monitors {monitor!r}, but the logged metrics are: {', '.join(sorted(metrics)) or 'none'} "
                "(monitor of EarlyStopping in trainer.callbacks)"
            )


def require_monitors(trainer: Trainer) -> None:
    """Put a `RequireMonitor` before each strict EarlyStopping."""
    checked: list[Callback] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback.strict:
            checked.append(RequireMonitor(callback))
        checked.append(callback)
    trainer.callbacks = checked  # type: ignore[attr-defined]


def reason_for_end(trainer: Trainer) -> str:
    """Why `trainer.fit` returned without a signal, as the end of a sentence: "reached trainer.max_steps=12"."""
    if trainer.global_step == trainer.max_steps:
        return f"reached trainer.max_steps={trainer.max_steps}"
    if not trainer.should_stop:
        limited = trainer.max_epochs not in (None, -1)
        return f"reached trainer.max_epochs={trainer.max_epochs}" if limited else "the data have no training batches"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message is not None:
            value = trainer.callback_metrics.get(callback.monitor)
            current = "" if value is None else f" is {float(value):.5g},"
            best = f"best {float(callback.best_score):.5g}, patience {callback.patience}"
            return f"early stopping: {callback.monitor}{current} {best}"
        remaining = callback.time_remaining() if isinstance(callback, Timer) else None
        if remaining is not None and remaining <= 0:
            return "reached trainer.max_time"
    return "a callback stopped it"


def _validates_by_steps(trainer: Trainer) -> bool:
    return any(isinstance(callback, callbacks.ValidateEvery) for callback in trainer.callbacks)  # type: ignore[attr-defined]

"""Callbacks about the end of a run: monitored metrics exist, the last step is validated, and an ended run stays ended."""

from __future__ import annotations

import difflib
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lit_llm import callbacks
from lit_llm.callbacks._lightning import accumulates, callback_of, metric_step, set_metrics
from lit_llm.callbacks.contracts import is_score
from lit_llm.core.errors import UserError


class RequireMonitor(Callback):
    """Raises a UserError if `watching`, a strict EarlyStopping or a StepCheckpoint, monitors a metric that is not logged.

    Place this callback before `watching`. A StepCheckpoint's score of tasks may be missing, as tasks may be scored later.

    Contract:
        on_train_start: restores the metric's value from the checkpoint. Gives an EarlyStopping its configured patience
            instead of the checkpoint's, and clears its earlier reason for stopping.
        on_validation_end, on_train_epoch_end: checks in the hook in which `watching` reads the metric: for EarlyStopping,
            after validation with a ValidateEvery, else at the end of an epoch.
        State: name, last value and step of the metric.
    """

    def __init__(self, watching: EarlyStopping | callbacks.StepCheckpoint) -> None:
        self.watching, self.patience = watching, getattr(watching, "patience", 0)
        self._restored: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__} {self.watching.state_key}"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        monitor = self.watching.monitor
        if monitor is None or (value := self._trainer.callback_metrics.get(monitor)) is None:
            return {}
        return {"metric": monitor, "value": float(value), "step": metric_step(self._trainer, monitor)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (saved := self._restored) is not None:
            set_metrics(trainer, {saved["metric"]: saved["value"]}, saved["step"])
        if isinstance(self.watching, EarlyStopping):
            self.watching.patience = self.patience
            self.watching.stopping_reason, self.watching.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit" and self._after_validation(trainer):
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._after_validation(trainer):
            self._check(trainer)

    def _after_validation(self, trainer: Trainer) -> bool:
        return isinstance(self.watching, callbacks.StepCheckpoint) or callback_of(trainer, callbacks.ValidateEvery) is not None

    def _check(self, trainer: Trainer) -> None:
        monitor, metrics, name = self.watching.monitor, trainer.callback_metrics, type(self.watching).__name__
        if name == "StepCheckpoint" and is_score(trainer, monitor):  # may come later
            return
        if getattr(self.watching, "strict", True) and monitor is not None and monitor not in metrics:
            names = sorted(name for name in metrics if not name.startswith(("health/", "setup/")))  # a hundred names
            close = difflib.get_close_matches(monitor, list(metrics), 1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            where = "--checkpoint.monitor" if name == "StepCheckpoint" else f"monitor of {name} in trainer.callbacks"
            raise UserError(
                f"{name} monitors {monitor!r}, but the logged metrics are: {', '.join(names) or 'none'} ({where}){hint}"
            )


class ValidateLast(Callback):
    """For runs without `ValidateEvery`: makes Lightning validate after the last step, so that the best checkpoint is known."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == trainer.max_steps:  # a signal has interrupted the last validation
            trainer.val_check_batch, trainer.check_val_every_n_epoch = 1, None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == trainer.max_steps and not accumulates(trainer):
            trainer.val_check_batch, trainer.check_val_every_n_epoch = 1, None


class StayEnded(Callback):
    """Sets `should_stop` before training if an earlier launch ended the run by a rule such as early stopping.

    Args:
        ended: whether an earlier launch ended the run. All ranks take the value of rank 0.
    """

    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop |= trainer.strategy.broadcast(self.ended)

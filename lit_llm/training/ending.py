"""The reason why training ended, what is wrong with its result, and a check of EarlyStopping."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor

from lit_llm import callbacks
from lit_llm.callbacks._lightning import accumulates, is_logged
from lit_llm.callbacks.progress_bar import format_line
from lit_llm.core.errors import UserError
from lit_llm.training.language_model import LanguageModel, safe_exp


class RequireMonitor(Callback):
    """Raises if the metric of a strict EarlyStopping or a StepCheckpoint does not exist. Must precede it.

    Contract:
        on_train_start: the patience is the configured one, not the checkpoint's, and a stop before that is over.
        on_validation_end, on_train_epoch_end: checks in the hook that the callback uses. An EarlyStopping checks after
            validation with a ValidateEvery, else at the end of an epoch.
        State: none.
    """

    def __init__(self, watching: EarlyStopping | callbacks.StepCheckpoint) -> None:
        self.watching, self.patience = watching, getattr(watching, "patience", 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        return isinstance(self.watching, callbacks.StepCheckpoint) or validates_by_steps(trainer)

    def _check(self, trainer: Trainer) -> None:
        monitor, metrics, name = self.watching.monitor, trainer.callback_metrics, type(self.watching).__name__
        if getattr(self.watching, "strict", True) and monitor is not None and monitor not in metrics:
            names = sorted(name for name in metrics if not name.startswith(("health/", "setup/")))  # a hundred more
            close = difflib.get_close_matches(monitor, list(metrics), 1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            where = "--checkpoint.monitor" if name == "StepCheckpoint" else f"monitor of {name} in trainer.callbacks"
            raise UserError(
                f"{name} monitors {monitor!r}, but the logged metrics are: {', '.join(names) or 'none'} ({where}){hint}"
            )


class ValidateLast(Callback):
    """Without `ValidateEvery`, makes validation due after the last step, so that its loss and the best checkpoint are known."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == trainer.max_steps and not accumulates(trainer):
            trainer.val_check_batch, trainer.check_val_every_n_epoch = 1, None


def require_monitors(trainer: Trainer) -> None:
    """Put a `RequireMonitor` before each EarlyStopping and StepCheckpoint."""
    checked: list[Callback] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping | callbacks.StepCheckpoint):
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
            return f"early stopping: {callback.monitor}{current} {_rule_of(callback)}"
        remaining = callback.time_remaining() if isinstance(callback, Timer) else None
        if remaining is not None and remaining <= 0:
            return "reached trainer.max_time"
    return "a callback stopped it"


def _rule_of(stop: EarlyStopping) -> str:
    """What made it stop, by the name of its setting."""
    if stop.stopping_reason is EarlyStoppingReason.STOPPING_THRESHOLD:
        return f"stopping_threshold {stop.stopping_threshold:g}"
    if stop.stopping_reason is EarlyStoppingReason.DIVERGENCE_THRESHOLD:
        return f"divergence_threshold {stop.divergence_threshold:g}"
    if stop.stopping_reason is EarlyStoppingReason.NON_FINITE_METRIC:
        return "which is not finite"
    best, delta = f"{float(stop.best_score):.5g}", abs(stop.min_delta)
    best = f"{best} at its last improvement by {delta:g} or more" if delta else f"best {best}"  # smaller ones do not change it
    return f"{best}, patience {stop.patience}"


def how_it_ended(trainer: Trainer) -> tuple[str, bool]:
    """(why `trainer.fit` is returning, whether that is the end that the settings ask for).

    A signal and the spike guard end a run before that, early stopping and `max_time` do not.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StopOnSignal) and callback.stopped_by:
            return f"stopped by {callback.stopped_by}", False
        if isinstance(callback, callbacks.SpikeGuard) and callback.diagnosis:
            return f"stopped by the spike guard: {callback.diagnosis}", False
    return reason_for_end(trainer), True


def loss_of_last_step(trainer: Trainer, model: LanguageModel) -> str | None:
    """The line of the last optimizer step, if it was not a logged one: "step 103/103  loss 2.3456  ppl 10.44"."""
    if not model.step_count or is_logged(trainer, trainer.global_step):
        return None
    loss = float(model.step_loss)
    return format_line(trainer.global_step, trainer.max_steps, {"train/loss": loss, "train/perplexity": safe_exp(loss)}, None)


def unsaved(trainer: Trainer, run_dir: Path, *, resumed: bool) -> str | None:
    """Why the result of training is not on disk, although the run saves checkpoints; a sentence, or None.

    Args:
        resumed: the run continued from a checkpoint, which is there even if this launch saved none.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StepCheckpoint) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            newest = callback.last_model_path
            if not trainer.global_step:
                return f"no optimizer step was made: {reason_for_end(trainer)} (--trainer.max_time, --trainer.max_steps)"
            if callback.last_save_failed or not (newest or resumed):
                kept = f"the newest one is {newest}" if newest else f"{run_dir} has none"
                return (
                    f"the last checkpoint, after step {trainer.global_step}, could not be saved, and {kept}: make room on the "
                    "disk, or choose another folder (--run_dir), and start again with --resume auto"
                )
    return None


def not_finite(trainer: Trainer, metrics: Mapping[str, Tensor]) -> str | None:
    """That training ended with a loss that is not finite: a sentence, or None.

    A SpikeGuard skips such steps. A finite validation loss then shows that the weights are fine.

    Args:
        metrics: the last values of all metrics.
    """
    losses = {name: float(metrics[name]) for name in ("train/loss", "val/loss") if name in metrics}
    guarded = any(isinstance(callback, callbacks.SpikeGuard) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if guarded and math.isfinite(losses.get("val/loss", math.nan)):
        return None
    for name, value in losses.items():
        if not math.isfinite(value):
            return (
                f"training ended after step {trainer.global_step} with {name} {value}: continue from a checkpoint before "
                "(--resume PATH) with a lower learning rate (--optimizer.lr) or stronger clipping (--gradient_norm.clip)"
            )
    return None


def validates_by_steps(trainer: Trainer) -> bool:
    return any(isinstance(callback, callbacks.ValidateEvery) for callback in trainer.callbacks)  # type: ignore[attr-defined]

"""Determines why a launch of `fit` ended, what is wrong with its result, and the exit code of the process."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor

from lit_llm import callbacks
from lit_llm.callbacks._lightning import callback_of
from lit_llm.core.errors import report
from lit_llm.data import TokenDataModule
from lit_llm.data.run_length import steps_of_passes

FAILED = 1
INTERRUPTED = 75
"""Exit code EX_TEMPFAIL of sysexits.h: a signal stopped training, and a checkpoint is saved, so that the run can continue."""


def outcome(trainer: Trainer) -> tuple[str, int | None]:
    """(why `trainer.fit` ended, such as "reached trainer.max_steps=12"; exit code if training is incomplete, else None).

    Training that early stopping or `max_time` ended is complete, because the settings ask for this end.
    """
    if (guard := callback_of(trainer, callbacks.SpikeGuard)) and guard.diagnosis:
        return f"stopped by the spike guard: {guard.diagnosis}", FAILED
    if (stop := callback_of(trainer, callbacks.StopOnSignal)) and stop.stopped_by:
        return f"stopped by {stop.stopped_by}", INTERRUPTED
    return reason_for_end(trainer), None


def code_after_training(trainer: Trainer, run_dir: Path, *, resumed: bool, ended_before: str | None) -> int | None:
    """Print how training ended. Return the exit code, or None if training is complete: then `code_at_end` returns it.

    Args:
        resumed: whether the run continued from a checkpoint.
        ended_before: why an earlier launch had ended the run, so that nothing was left to train; None if none had ended it.
    """
    reason, code = outcome(trainer)
    if code == INTERRUPTED and (problem := unsaved(trainer, run_dir, resumed=resumed)):
        report(f"{reason}; {problem}")
        return FAILED
    if trainer.is_global_zero and code == INTERRUPTED:
        print(f"{reason} after step {trainer.global_step}; continue with: {continue_command(run_dir)}")
    elif trainer.is_global_zero and code is None:
        print(f"training ended after step {trainer.global_step}: {ended_before or reason}")
    return code  # SpikeGuard has said what it found


def code_at_end(trainer: Trainer, run_dir: Path, metrics: Mapping[str, Tensor], *, resumed: bool, followed: bool) -> int:
    """Print what is wrong with the result after the final evaluation, and return the exit code of `fit`.

    Args:
        metrics: name → last value of each metric.
        resumed: whether the run continued from a checkpoint.
        followed: whether the losses matched the curve of --check_against; True without that flag.
    """
    problems = [unsaved(trainer, run_dir, resumed=resumed), not_finite(trainer, metrics)]
    report("\n".join(filter(None, problems)))
    return 0 if followed and not any(problems) else FAILED


def continue_command(run_dir: Path) -> str:
    return f"python -m lit_llm fit --run {shlex.quote(str(run_dir))} --resume auto"


def reason_for_end(trainer: Trainer) -> str:
    """Why `trainer.fit` returned, if no signal stopped it, as the end of a sentence: "reached trainer.max_steps=12"."""
    data, epochs = getattr(trainer, "datamodule", None), trainer.max_epochs or -1
    by_epochs = "" if epochs == -1 else f"reached trainer.max_epochs={epochs}"
    if trainer.global_step == trainer.max_steps:  # `set_end` has lowered max_steps if the epochs end before it
        passes = isinstance(data, TokenDataModule) and by_epochs and trainer.global_step == steps_of_passes(data, epochs)
        cut = isinstance(trainer.limit_train_batches, int) and trainer.current_epoch == epochs
        return by_epochs if passes or cut else f"reached trainer.max_steps={trainer.max_steps}"
    if not trainer.should_stop:
        return by_epochs or "the data have no training batches"
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
    """The rule by which an EarlyStopping stopped training, as text, such as "best 3.2, patience 5"."""
    for name in ("stopping_threshold", "divergence_threshold"):
        if stop.stopping_reason is EarlyStoppingReason[name.upper()]:
            return f"{name} {getattr(stop, name):g}"
    if stop.stopping_reason is EarlyStoppingReason.NON_FINITE_METRIC:
        return "which is not finite"
    best, delta = f"{float(stop.best_score):.5g}", abs(stop.min_delta)
    best = f"{best} at its last improvement by {delta:g} or more" if delta else f"best {best}"  # smaller gains do not count
    return f"{best}, patience {stop.patience}"


def unsaved(trainer: Trainer, run_dir: Path, *, resumed: bool) -> str | None:
    """A sentence if the run saves checkpoints, but its last weights are not on the disk; else None.

    Args:
        resumed: whether the run continued from a checkpoint, so that one exists even if this launch saved none.
    """
    saving = callback_of(trainer, callbacks.StepCheckpoint)
    if saving is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    if not trainer.global_step:
        return f"no optimizer step was made: {reason_for_end(trainer)} (--trainer.max_time, --trainer.max_steps)"
    newest = saving.last_model_path
    if not saving.last_save_failed and (newest or resumed):
        return None
    kept = f"the newest one is {newest}" if newest else f"{run_dir} has none"
    return (
        f"the last checkpoint, after step {trainer.global_step}, could not be saved, and {kept}: make room on the disk, or "
        "choose another folder (--run_dir), and start again with --resume auto"
    )


def not_finite(trainer: Trainer, metrics: Mapping[str, Tensor]) -> str | None:
    """A sentence if training ended with an infinite or NaN loss, else None.

    Also None if the run has a SpikeGuard, which skips such steps, and the validation loss is finite.

    Args:
        metrics: name → last value of each metric.
    """
    losses = {name: float(metrics[name]) for name in ("train/loss", "val/loss") if name in metrics}
    if callback_of(trainer, callbacks.SpikeGuard) and math.isfinite(losses.get("val/loss", math.nan)):
        return None
    for name, value in losses.items():
        if not math.isfinite(value):
            return (
                f"training ended after step {trainer.global_step} with {name} {value}: continue from a checkpoint before "
                "(--resume PATH) with a lower learning rate (--optimizer.lr) or stronger clipping (--gradient_norm.clip)"
            )
    return None

"""Runs the command `fit` with built objects: checks that need the data, training, and the final evaluation."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Literal

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

import lit_llm.data
from lit_llm.callbacks._lightning import callback_of, write_row
from lit_llm.core._lightning import restores_checkpoint
from lit_llm.core.disk import naming, real_path, write_text
from lit_llm.core.errors import UserError, first_line, refuse, report
from lit_llm.core.ranks import is_rank_zero
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.runs.init_from import InitialWeights
from lit_llm.runs.loaded_run import LoadedRun
from lit_llm.runs.resume import RunStart
from lit_llm.runs.run_folder import CHECKPOINTS, ENDED, holds_run
from lit_llm.training.folder_guard import FolderGuard
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.lost_peer import is_lost_peer, is_port_in_use
from lit_llm.training.outcome import (
    FAILED,
    code_after_training,
    code_at_end,
    continue_command,
    reason_for_end,
)
from lit_llm.training.progress_watch import UNKNOWN, ProgressWatch


def fit(
    trainer: Trainer,
    model: LanguageModel,
    data: LightningDataModule,
    start: RunStart,
    run_dir: Path,
    *,
    initial: InitialWeights | None,
    accept_changes: bool,
) -> int:
    """Train, then evaluate on validation data; return the exit code of `fit`.

    The code is 1 if SpikeGuard stopped training, another process ended early, the last checkpoint could not be saved, the last
    loss was not finite, or a loss differs from the curve of --check_against. It is 75 after a signal, and otherwise 0.

    Args:
        trainer: with all callbacks of a run (`config.run_callbacks`).
        start: the checkpoint from which training continues, if any.
        initial: the weights with which training starts; None: random weights.
        accept_changes: Continue even if the data differ from the checkpoint's.

    Raises:
        UserError: The data do not fit the run or its weights, or another process uses the run folder, which is unchanged.
        KeyboardInterrupt: The user interrupted training; Lightning itself would raise SystemExit.
    """
    follower = next((logger for logger in trainer.loggers if isinstance(logger, CurveFollower)), None)
    if is_rank_zero() and isinstance(data, lit_llm.data.TokenDataModule):
        _check_data(data, model, start, initial, accept_changes=accept_changes)
    guard = callback_of(trainer, FolderGuard)
    with contextlib.nullcontext() if guard is None else guard.held():
        if is_rank_zero():
            if follower is not None and start.step is not None and holds_run(run_dir):
                follower.catch_up(LoadedRun(run_dir, of_lit_llm=False).curve, start.step)
            if start.checkpoint is not None:
                print(f"resume: from step {start.step}, {start.checkpoint}")
            for change in start.announced:
                print(f"resume: {change}")
            for change in [] if initial is None else initial.reinterpretations(model.config, model.architecture):
                print(f"start: {change}")
        code = _train(trainer, model, data, start, run_dir, guard)
        if code is not None:
            return code
        if trainer.should_stop and start.end is None and guard is not None and holds_run(run_dir):
            with contextlib.suppress(OSError):  # without the file, the next launch trains until the same rule ends it
                write_text(run_dir / ENDED, json.dumps({"step": trainer.global_step, "reason": reason_for_end(trainer)}))
        metrics = dict(trainer.callback_metrics)  # an evaluation clears them
        if model.step_count and not model.step_loss.isfinite():  # the last step may not have been logged
            metrics["train/loss"] = model.step_loss
        _evaluate(trainer, model, data, start)
        metrics |= trainer.callback_metrics
    print_metrics(trainer, "val", run_dir, trainer.global_step)
    if follower is not None and trainer.is_global_zero:
        print(follower.summary())
    followed = follower is None or not trainer.is_global_zero or follower.followed
    return code_at_end(trainer, run_dir, metrics, resumed=start.checkpoint is not None, followed=followed)


def _check_data(
    data: lit_llm.data.TokenDataModule,
    model: LanguageModel,
    start: RunStart,
    initial: InitialWeights | None,
    *,
    accept_changes: bool,
) -> None:
    """Open the data, before Lightning opens the event file.

    Raises:
        UserError: The tokenizer is not that of the initial weights, the data cannot serve the objective, or the data differ
            from those of the continued checkpoint and `accept_changes` is false.
    """
    data.prepare_data()
    data.setup()
    model.objective.use(data, "fit")
    problem = None if initial is None else initial.tokenizer_problem(data.tokenizer)
    if problem is not None:
        raise UserError(problem)
    refuse(start.data_changes(data, model.config.vocab_size, accepted=accept_changes))
    # `data_changes` compares data that are made from texts by these texts. Other data are compared by their token files.
    if data.seen_sources() is None and (saved := start.saved_data(data)) is not None:
        refuse(data.opened.files.changes(saved.get("files", {}), accepted=accept_changes))


def _train(
    trainer: Trainer,
    model: LanguageModel,
    data: LightningDataModule,
    start: RunStart,
    run_dir: Path,
    guard: FolderGuard | None,
) -> int | None:
    """Train, print how training ended, and return the exit code if training is incomplete; None if it is complete."""
    try:
        with naming(run_dir):
            trainer.fit(model, datamodule=data, ckpt_path=start.checkpoint, weights_only=True)
    except (SystemExit, Exception) as error:
        if isinstance(error, FileNotFoundError) and not run_dir.exists():
            report(f"run folder {run_dir} was deleted while its run was writing: {error.strerror} (--run_dir)")
            return FAILED
        if guard is not None and trainer.global_step in (0, start.step) and not is_lost_peer(error):
            guard.restore()  # the same command must work again
        if isinstance(error, SystemExit):  # Lightning turns a KeyboardInterrupt into it
            raise KeyboardInterrupt from None
        if isinstance(error, BlockingIOError):  # raised by a fork
            raise UserError(
                "no further process can be started: raise the limit (ulimit -u), or lower --data.num_workers"
            ) from None
        if isinstance(error, OSError) and guard is not None and not guard.training_began and guard.is_where(error):
            raise UserError(
                f"run folder {run_dir} cannot be written: {error.strerror}; make room on the disk, or choose another folder "
                "(--run_dir DIR)"
            ) from None
        if is_port_in_use(error):
            port = os.environ.get("MASTER_PORT")
            raise UserError(f"port {port} is in use by another process; choose another one (MASTER_PORT=N)") from None
        if start.checkpoint is not None and (problem := restore_problem(start.checkpoint, error)):
            raise UserError(f"{problem} (--resume)") from error
        if not is_lost_peer(error):
            raise
        last = run_dir / CHECKPOINTS / "last.ckpt"
        how = "no checkpoint exists yet, start again with --resume auto"
        if last.exists():
            how = f"the last checkpoint is {real_path(last)}, continue with: {continue_command(run_dir)}"
        watch = callback_of(trainer, ProgressWatch)
        which = UNKNOWN if watch is None else watch.lost()
        print(f"rank {trainer.global_rank}: {which} of this run ended. See its output for the reason; {how}", file=sys.stderr)
        return FAILED
    finally:
        trainer.strategy.checkpoint_io.teardown()  # waits for a background save, as Lightning does not after some errors
    return code_after_training(trainer, run_dir, resumed=start.checkpoint is not None, ended_before=start.end)


def restore_problem(checkpoint: Path, error: Exception) -> str | None:
    """A sentence that the checkpoint cannot be restored, if `error` was raised while Lightning restored it; else None."""
    if isinstance(error, UserError) or is_lost_peer(error) or not restores_checkpoint(error):
        return None
    return f"{checkpoint} cannot be restored: {type(error).__name__}: {first_line(error)[:200]}"


def _evaluate(trainer: Trainer, model: LanguageModel, data: LightningDataModule, start: RunStart) -> None:
    """Validate the final weights, unless training has done so, and log the metrics, unless this launch has made no step."""
    if model.validated_step == trainer.global_step:
        return
    loggers, trainer.loggers = trainer.loggers, []  # Lightning would log at a wrong step
    evaluated = trainer.validate(model, datamodule=data, verbose=False)
    trainer.loggers = loggers
    if trainer.global_step != start.step:  # otherwise an earlier launch has logged it
        for metrics in evaluated:  # empty with limit_val_batches 0
            write_row(trainer, metrics, trainer.global_step)
        for logger in trainer.loggers:
            logger.save()  # training has finalized them


@rank_zero_only
def print_metrics(trainer: Trainer, prefix: Literal["val", "test"], run_dir: Path, steps: int) -> None:
    """On rank 0, print a table of the metrics of validation ("val") or test ("test"). `steps`: optimizer steps so far."""
    metrics = dict(trainer.callback_metrics)
    if f"{prefix}/bits_per_byte" in metrics:
        metrics[f"{prefix}/bits_per_token"] = metrics[f"{prefix}/loss"] / math.log(2)
    table = Table("metric", "value", title=f"{run_dir} at step {steps}", title_justify="left")
    names = ("loss", "perplexity", "bits_per_token", "bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte")
    first = [f"{prefix}/{name}" for name in names]
    for name in (*first, *(name for name in metrics if name.startswith(f"{prefix}/") and name not in first)):
        if name in metrics and math.isfinite(float(metrics[name])):
            table.add_row(name, f"{float(metrics[name]):.4f}")
    if table.row_count:  # none without validation data
        Console(file=sys.stdout).print(table)

"""Training as a command: what is judged once the data are open, the run itself, and what is left and said at its end."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Literal

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

import lit_llm.data
from lit_llm import callbacks
from lit_llm.errors import UserError
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.runs.initial_weights import InitialWeights
from lit_llm.runs.logged_curve import logged
from lit_llm.runs.resume import RunStart
from lit_llm.runs.run_folder import CHECKPOINTS, holds_run, set_aside
from lit_llm.training.language_model import LanguageModel


def fit(
    trainer: Trainer,
    model: LanguageModel,
    data: LightningDataModule,
    start: RunStart,
    run_dir: Path,
    *,
    initial: InitialWeights | None,
    replace: bool,
    accept_changes: bool,
) -> int:
    """Train, and evaluate what was trained; returns the exit code: 1 when training was given up, on this rank or a lost one.

    Args:
        initial: the weights to begin with, instead of random ones.
        replace: set the run that is in the folder aside.
        accept_changes: go on with other data than the checkpoint's.

    Raises:
        UserError: the data are not what the run or its weights need; the folder is then as it was.
        KeyboardInterrupt: as Lightning's SystemExit means it.
    """
    existed, aside = True, None
    follower = next((logger for logger in trainer.loggers if isinstance(logger, CurveFollower)), None)
    if getattr(rank_zero_only, "rank", 0) == 0:
        if isinstance(data, lit_llm.data.TokenDataModule):
            # Lightning opens the event file before it looks at the data: what is wrong with the data must come first.
            data.prepare_data()
            data.setup()
            problem = None if initial is None else initial.tokenizer_problem(data.tokenizer)
            if problem is not None:
                raise UserError(problem)
            changes = start.data_changes(data, model.config.vocab_size, accepted=accept_changes)
            if changes:
                raise UserError("\n".join(changes))
        if follower is not None and start.step is not None and holds_run(run_dir):
            follower.catch_up(logged(run_dir), start.step)
        if start.checkpoint is not None:
            print(f"resume: from step {start.step}, {start.checkpoint}")
        existed = run_dir.exists() and not replace
        aside = set_aside(run_dir) if replace else None
    try:
        trainer.fit(model, datamodule=data, ckpt_path=start.checkpoint, weights_only=True)
    except SystemExit:  # what Lightning makes of it
        raise KeyboardInterrupt from None
    except (ValueError, RuntimeError) as error:
        if trainer.global_step in (0, start.step) and not existed:  # a run that broke later keeps its curves
            _leave_as_it_was(run_dir, aside)
        if str(error).startswith("Early stopping conditioned on metric"):  # the user's own, through trainer.callbacks+
            raise UserError(f"{' '.join(str(error).split())} (monitor of EarlyStopping)") from None
        if not _says_that_a_peer_ended(error):
            raise
        last = run_dir / CHECKPOINTS / "last.ckpt"
        there = "there is no checkpoint yet, start again with --resume auto"
        if last.exists():
            there = (
                f"the last checkpoint is {last.resolve()}, continue with: python -m lit_llm fit --run {run_dir} --resume auto"
            )
        who = f"rank {trainer.global_rank}: another process of this run ended, its own output says why"
        print(f"{who}; {there}", file=sys.stderr)
        return 1
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StopOnSignal) and callback.stopped_by:
            if trainer.is_global_zero:
                print(
                    f"stopped by {callback.stopped_by} after step {trainer.global_step}; continue with: "
                    f"python -m lit_llm fit --run {run_dir} --resume auto"
                )
            return callback.exit_code
        if isinstance(callback, callbacks.SpikeGuard) and callback.diagnosis:
            return 0 if _started_by_rank_zero(trainer) else 1
    if "val/loss" not in trainer.callback_metrics:  # a finished run that was resumed, or --validation null
        loggers, trainer.loggers = trainer.loggers, []  # Lightning would write at a step of its own
        evaluated = trainer.validate(model, datamodule=data, verbose=False)
        trainer.loggers = loggers
        if trainer.global_step != start.step:  # else it is in the curves
            for metrics in evaluated:  # none with limit_val_batches 0
                model.log_row(dict(metrics), trainer.global_step)
    print_metrics(trainer, "val", run_dir, trainer.global_step)
    if follower is None or not trainer.is_global_zero:
        return 0
    print(follower.summary())
    return 0 if follower.followed else 1


@rank_zero_only
def print_metrics(trainer: Trainer, prefix: Literal["val", "test"], run_dir: Path, steps: int) -> None:
    """A table of what evaluating the weights after so many optimizer steps gave."""
    metrics = trainer.callback_metrics
    table = Table("metric", "value", title=f"{run_dir} at step {steps}", title_justify="left")
    for name in (f"{prefix}/loss", f"{prefix}/perplexity", f"{prefix}/bits_per_byte"):
        if name in metrics and math.isfinite(float(metrics[name])):
            table.add_row(name, f"{float(metrics[name]):.4f}")
    Console(file=sys.stdout).print(table)


def _says_that_a_peer_ended(error: Exception) -> bool:
    """Whether gloo lost its connection to another process; NCCL does not say that much, and ends this process by itself."""
    said = str(error)
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and "gloo/transport" in said and any(words in said for words in lost)


def _started_by_rank_zero(trainer: Trainer) -> bool:
    """Whether Lightning started this process: its rank 0 kills itself when one of those fails, so speaks for all."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return isinstance(environment, LightningEnvironment) and trainer.local_rank > 0


def _leave_as_it_was(run_dir: Path, aside: Path | None) -> None:
    """After a start that was refused: a folder that this launch made holds nothing yet, and must not look like a run."""
    if not (run_dir / CHECKPOINTS).exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        if aside is not None:
            aside.rename(run_dir)

"""The command `fit`: checks that need the data, training, and evaluation."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

import lit_llm.data
from lit_llm.callbacks._lightning import write_row
from lit_llm.checkpoint.format import clear_leftovers
from lit_llm.core._lightning import is_rank_zero, restores_checkpoint
from lit_llm.core.disk import delete, is_disk_error, naming, read_ordinary, write_bytes, write_text
from lit_llm.core.errors import UserError, report
from lit_llm.hf.tokenizer_files import COMPANIONS
from lit_llm.plan.run_record import PLAN
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.runs.initial_weights import InitialWeights
from lit_llm.runs.lock import LOCK, RunLock
from lit_llm.runs.logged_curve import logged
from lit_llm.runs.resume import RunStart
from lit_llm.runs.run_folder import CHECKPOINTS, CONFIG, ENDED, holds_run, set_aside
from lit_llm.tokenizers import TOKENIZER_FILE
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.lost_peer import PeerWatch, is_lost_peer, is_port_in_use
from lit_llm.training.monitor_checks import ValidateLast, require_monitors, validates_by_steps
from lit_llm.training.outcome import (
    FAILED,
    code_after_training,
    code_at_end,
    continue_command,
    exit_code,
    loss_of_last_step,
    reason_for_end,
)
from lit_llm.training.progress_watch import ProgressWatch


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
    hang_timeout: float | None = None,
    log_dir: Path | None = None,
) -> int:
    """Train, then evaluate; returns the exit code.

    It is 1 if SpikeGuard stopped training, another process ended early, the last checkpoint could not be saved, the loss was
    not finite at the end, or the run left the curve that it was checked against.

    Args:
        initial: Initial weights instead of random ones.
        replace: Move an existing run in the folder aside.
        accept_changes: Continue even if the data differ from the checkpoint's.
        hang_timeout: Seconds without progress on any rank after which all end. None: they wait for ever.
        log_dir: Where the record of collectives goes then. None: the run folder.

    Raises:
        UserError: The data do not fit the run or its weights, or the folder is in use. The folder is then unchanged.
        KeyboardInterrupt: Instead of Lightning's SystemExit.
    """

    def stay_ended(trainer: Trainer, _: LightningModule) -> None:  # rank 0 knows
        trainer.should_stop |= trainer.strategy.broadcast(start.end is not None)

    require_monitors(trainer)
    if not validates_by_steps(trainer):
        trainer.callbacks.append(ValidateLast())  # type: ignore[attr-defined]
    trainer.callbacks[:0] = [PeerWatch(), LambdaCallback(on_fit_start=stay_ended)]  # type: ignore[attr-defined]
    watch = None if hang_timeout is None else ProgressWatch(hang_timeout, log_dir or run_dir)
    if watch is not None:
        trainer.callbacks.insert(0, watch)  # type: ignore[attr-defined]
    follower = next((logger for logger in trainer.loggers if isinstance(logger, CurveFollower)), None)
    if is_rank_zero() and isinstance(data, lit_llm.data.TokenDataModule):
        _check_data(data, model, start, initial, accept_changes=accept_changes)
    existed = run_dir.exists()
    with start.lock or contextlib.nullcontext():
        folder = None
        if start.lock is not None:
            start.refuse_if_outdated(run_dir)
            folder = _FolderBefore(run_dir, start.lock, existed=existed, replace=replace)
            clear_leftovers(run_dir / CHECKPOINTS)  # a run that has ended saves no more
            trainer.callbacks.append(_Owner(start.lock, folder))  # type: ignore[attr-defined]
        if is_rank_zero():
            if follower is not None and start.step is not None and holds_run(run_dir):
                follower.catch_up(logged(run_dir), start.step)
            if start.checkpoint is not None:
                print(f"resume: from step {start.step}, {start.checkpoint}")
            for change in start.announced:
                print(f"resume: {change}")
            for change in [] if initial is None else initial.reinterpretations(model.config, model.architecture):
                print(f"start: {change}")
        code = _train(trainer, model, data, start, run_dir, folder, watch)
        if code is not None:
            return code
        if trainer.should_stop and start.end is None and folder is not None and holds_run(run_dir):
            with contextlib.suppress(OSError):  # then the next launch trains on, until the same rule ends it again
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
    """Raise a UserError if the data do not fit. Runs early, because Lightning opens the event file before the data."""
    data.prepare_data()
    data.setup()
    problem = None if initial is None else initial.tokenizer_problem(data.tokenizer)
    if problem is not None:
        raise UserError(problem)
    changes = start.data_changes(data, model.config.vocab_size, accepted=accept_changes)
    if changes:
        raise UserError("\n".join(changes))


def _train(
    trainer: Trainer,
    model: LanguageModel,
    data: LightningDataModule,
    start: RunStart,
    run_dir: Path,
    folder: _FolderBefore | None,
    watch: ProgressWatch | None,
) -> int | None:
    """Train; returns the exit code of an incomplete run, or None after a complete one."""
    try:
        with naming(run_dir):
            trainer.fit(model, datamodule=data, ckpt_path=start.checkpoint, weights_only=True)
    except SystemExit:  # Lightning turns a KeyboardInterrupt into it
        if folder is not None and trainer.global_step in (0, start.step):  # the same command must work again
            folder.restore()
        raise KeyboardInterrupt from None
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not run_dir.exists():
            report(f"run folder {run_dir} was deleted while its run was writing: {error.strerror} (--run_dir)")
            return exit_code(trainer)
        if isinstance(error, UserError) and folder is not None and trainer.global_step in (0, start.step):
            folder.restore()
        if isinstance(error, OSError) and folder is not None and not folder.training_began and folder.is_where(error):
            folder.restore()
            raise UserError(
                f"run folder {run_dir} cannot be written: {error.strerror}; make room on the disk, or choose another folder "
                "(--run_dir DIR)"
            ) from None
        if is_port_in_use(error):
            port = os.environ.get("MASTER_PORT")
            raise UserError(f"port {port} is in use by another process; choose another one (MASTER_PORT=N)") from None
        if start.checkpoint is not None and not isinstance(error, UserError) and restores_checkpoint(error):
            if folder is not None:
                folder.restore()
            raise UserError(
                f"{start.checkpoint} cannot be continued: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]} "
                "while its state was restored (--resume)"
            ) from error
        if not is_lost_peer(error):
            raise
        last = run_dir / CHECKPOINTS / "last.ckpt"
        how = "no checkpoint exists yet, start again with --resume auto"
        if last.exists():
            how = f"the last checkpoint is {last.resolve()}, continue with: {continue_command(run_dir)}"
        lost = None if watch is None else watch.lost_rank()
        which = "another process" if lost is None else f"rank {lost}"
        print(f"rank {trainer.global_rank}: {which} of this run ended. See its output for the reason; {how}", file=sys.stderr)
        return FAILED
    finally:
        trainer.strategy.checkpoint_io.teardown()  # a checkpoint in the background; Lightning leaves this out after some errors
    if trainer.is_global_zero and (line := loss_of_last_step(trainer, model)):
        print(line)
    return code_after_training(trainer, run_dir, resumed=start.checkpoint is not None, ended_before=start.end)


def _evaluate(trainer: Trainer, model: LanguageModel, data: LightningDataModule, start: RunStart) -> None:
    """Validate the final weights, unless training did. Needed after resuming a run that has ended."""
    if model.validated_step == trainer.global_step:
        return
    loggers, trainer.loggers = trainer.loggers, []  # Lightning would log at a wrong step
    evaluated = trainer.validate(model, datamodule=data, verbose=False)
    trainer.loggers = loggers
    if trainer.global_step != start.step:  # otherwise it was logged before
        for metrics in evaluated:  # empty with limit_val_batches 0
            write_row(trainer, metrics, trainer.global_step)
        for logger in trainer.loggers:
            logger.save()  # training has finalized them


@rank_zero_only
def print_metrics(trainer: Trainer, prefix: Literal["val", "test"], run_dir: Path, steps: int) -> None:
    """Print a table of evaluation metrics after `steps` optimizer steps."""
    metrics = trainer.callback_metrics
    table = Table("metric", "value", title=f"{run_dir} at step {steps}", title_justify="left")
    by_source = [name for name in metrics if name.startswith(f"{prefix}/") and name.count("/") == 2]
    for name in (f"{prefix}/loss", f"{prefix}/perplexity", f"{prefix}/bits_per_byte", *by_source):
        if name in metrics and math.isfinite(float(metrics[name])):
            table.add_row(name, f"{float(metrics[name]):.4f}")
    Console(file=sys.stdout).print(table)


class _Owner(Callback):
    """Checks before each save that this run still holds the lock of its folder, and notes when training begins."""

    def __init__(self, lock: RunLock, folder: _FolderBefore) -> None:
        self.lock, self.folder = lock, folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.folder.training_began = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.lock.check()


_WRITTEN = {CONFIG, TOKENIZER_FILE, *COMPANIONS, "hparams.yaml", PLAN}
"""What a launch writes into a run folder before the first step, beside TensorBoard's event file."""


class _FolderBefore:
    """The run folder as it was before this launch, to restore it if the configuration is refused.

    Args:
        lock: Held; acquired again if the folder is replaced.
        existed: Whether the folder existed before the lock was acquired.
        replace: Move the folder aside if it existed.
    """

    def __init__(self, run_dir: Path, lock: RunLock, *, existed: bool, replace: bool) -> None:
        self.run_dir, self.existed = run_dir, existed
        self.aside: Path | None = None
        self.training_began = False
        self.names: set[str] = set()
        self.contents: dict[Path, bytes] = {}
        if existed and replace:
            self.aside, self.existed = set_aside(run_dir), False
            lock.acquire()  # in the new folder
            assert self.aside is not None
            delete(self.aside / LOCK)
        if self.existed:
            self.names = {path.name for path in run_dir.iterdir()}
            self.contents = {run_dir / name: read_ordinary(run_dir / name) for name in self.names & _WRITTEN}

    def is_where(self, error: OSError) -> bool:
        """Whether an error while files of the run are written concerns its folder. Of a write, it names no file."""
        if error.filename is None:
            return is_disk_error(error)
        return Path(os.fsdecode(error.filename)).absolute().is_relative_to(self.run_dir.absolute())

    def restore(self) -> None:
        """Delete the files of this launch. Keeps a new folder that has checkpoints."""
        if not self.existed:
            if not (self.run_dir / CHECKPOINTS).exists():
                shutil.rmtree(self.run_dir, ignore_errors=True)
                if self.aside is not None:
                    self.aside.rename(self.run_dir)
            return
        for path in self.run_dir.iterdir():
            if path.name not in self.names and (path.name in _WRITTEN or path.name.startswith("events.out.tfevents.")):
                delete(path)
        for path, content in self.contents.items():
            with contextlib.suppress(OSError):  # the disk refuses this, too; then it has refused a new file as well
                write_bytes(path, content)

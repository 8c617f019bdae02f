"""Stops training cleanly on a signal."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from ._lightning import (
    ValidationInterrupted,
    _AfterSteps,
    _PutsBack,
    enter_finished_fit,
    interruptible_validation,
    note_sigterm_only,
    skip_next_validation,
    stop_now,
    take_sigterm,
    validate_when_resuming,
    validation_follows,
    without_sigterm_broadcast,
)
from ._torch import process_count

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopOnSignal(_PutsBack, _AfterSteps):
    """On SIGTERM, SIGINT or SIGUSR1 to any rank: finishes the optimizer step or validation batch, saves, and stops.

    A second SIGINT interrupts immediately (KeyboardInterrupt).

    The handler only sets a flag. After each optimizer step and before each validation batch, the ranks all-reduce the flag, so
    all stop at the same point. On accelerators, the result of an all-reduce is read at the next step or batch: no rank waits,
    and the stop comes one step or batch later. `min_steps` and `min_epochs` do not delay the stop.

    A due validation is skipped, a running validation interrupted: the resumed run makes it in full before its first step. Two
    kinds of validation are completed instead: at the end of an epoch, which Lightning cannot resume (unless `max_steps` ends
    training there), and with loaders of unknown length on several ranks.

    For the calling program: `stopped_by` is the signal's name after an interrupted `fit`, otherwise None. After a signal, exit
    with 75 (EX_TEMPFAIL of sysexits.h: try again), but with 0 in processes that Lightning launched: if such a process fails,
    rank 0 kills itself. For callbacks that save: `save_now` becomes True in on_train_batch_end or on_validation_batch_start.

    A signal to a whole process group (Ctrl-C, schedulers) also reaches data loader workers, which the run still needs: give the
    loaders `worker_init_fn=ignore_signals` from this file.

    Replaces Lightning's signal handling: SIGTERM (exception, no checkpoint, exit code 0), SLURM auto-requeue (saves inside
    a step), and the broadcast of a SIGTERM flag before every micro-batch.

    Logs: nothing.

    Contract:
        setup: makes Lightning's SIGTERM handler, which Lightning installs before this callback's, set a flag only.
        on_fit_start, on_train_start: schedule the validation that the previous run interrupted.
        on_train_start: replaces Lightning's handlers; an earlier SIGTERM still counts. Lightning restores the original handlers
            after the last save.
        on_train_batch_end, on_validation_batch_start: all-reduce the flag and stop if it is set on any rank.
        on_validation_end: clears the record of an interrupted validation.
        on_train_end: waits for the pending all-reduce.
        teardown, on_exception: restore Lightning's methods.
        State: whether a validation was interrupted.
    Cost: on several processes, one all-reduce a step or validation batch: 0.2 to 0.5 ms between two busy CPU processes.

    Does nothing, with a warning, if `fit` does not run in the main thread: Python allows signal handlers only there.
    """

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        self.save_now = False
        self._received = 0  # signal number of the last signal, 0 = none
        self._interrupted = False  # by a first SIGINT
        self._installed = False
        self._group: Any = None
        self._lags = False
        self._pending: tuple[Any, Tensor] | None = None  # all-reduce in progress, and its result
        self._validation_is_due = False  # the resumed run begins with a validation
        self._validation_batches = 0  # left in this validation that all ranks have, each preceded by an all-reduce
        self._restore_minima: Callable[[], None] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._validation_is_due = False  # load_state_dict runs later and may set it
            self._undo += (note_sigterm_only(trainer),)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._undo += (enter_finished_fit(trainer, lambda: self._validation_is_due),)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validation_is_due:
            validate_when_resuming(trainer)
        super().on_train_start(trainer, pl_module)
        self.stopped_by, self.save_now, self._received, self._pending = None, False, 0, None
        self._interrupted = False
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            rank_zero_warn("StopOnSignal does nothing: signals reach only the main thread, but fit runs in another thread.")
            return
        for signum in _SIGNALS:
            signal.signal(signum, self._handle)
        if take_sigterm(trainer):
            self._received = signal.SIGTERM
        self._undo += (interruptible_validation(trainer),)
        if process_count() > 1:
            # A separate CPU group: independent of the device, and of the order of other collectives.
            self._group = dist.new_group(backend="gloo")
            self._lags = trainer.strategy.root_device.type != "cpu"
            self._undo += (without_sigterm_broadcast(trainer),)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self._received = signum
        name = signal.Signals(signum).name
        again = " Press Ctrl-C again to stop immediately." if signum == signal.SIGINT else ""
        # Not print: it is not reentrant, and the handler may interrupt a print.
        os.write(2, f"{name}: stopping after this optimizer step.{again}\n".encode())

    def _after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if not self._installed or self.save_now:
            return
        self._validation_is_due = False  # that of an earlier step
        signum = self._any_signal()
        if not signum:
            return
        follows = validation_follows(trainer)
        deferred = follows and _can_be_deferred(trainer)
        if step == trainer.max_steps and not deferred:
            return  # training ends here anyway
        if deferred or not follows:  # Lightning validates at every early stop
            skip_next_validation(trainer)
        self._validation_is_due = deferred
        self._stop(trainer, signum)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_batches = 0
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or not self._installed or self.save_now:
            return
        if not _can_be_deferred(trainer):
            return
        if self._group is None:
            self._validation_batches = -1  # never 0: check before every batch
            return
        # The minimum over ranks, because every all-reduce needs all of them.
        known = sum(trainer.fit_loop.epoch_loop.val_loop.max_batches)  # infinite if the length of a loader is unknown
        batches = torch.tensor(0 if known == float("inf") else int(known))
        dist.all_reduce(batches, dist.ReduceOp.MIN, group=self._group)
        self._validation_batches = int(batches)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._validation_batches == 0:
            return
        self._validation_batches -= 1
        if signum := self._any_signal():
            self._validation_is_due = True
            self._stop(trainer, signum)
            raise ValidationInterrupted

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._validation_is_due = False

    def _any_signal(self) -> int:
        """The largest signal number that any rank has received, or 0. On accelerators, the largest at the previous call, whose
        all-reduce has ended, so that no rank waits. A collective."""
        if self._group is None:
            return self._received
        previous, mine = self._pending, torch.tensor(self._received)
        self._pending = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True), mine
        if not self._lags:
            previous, self._pending = self._pending, None
        return _wait(previous)

    def _stop(self, trainer: Trainer, signum: int) -> None:
        self.stopped_by = signal.Signals(signum).name
        self.save_now = True
        self._restore_minima = stop_now(trainer)
        rank_zero_info(f"{self.stopped_by}: training stops after optimizer step {trainer.global_step}.")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _wait(self._pending)
        self._pending = None
        if self._restore_minima is not None:
            self._restore_minima()
            self._restore_minima = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._group = None  # not destroyed: that would wait for ranks that may be gone

    def state_dict(self) -> dict[str, Any]:
        return {"validation_is_due": True} if self._validation_is_due else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validation_is_due = state_dict["validation_is_due"]


def ignore_signals(worker_id: int) -> None:
    """`worker_init_fn` of a DataLoader: the worker ignores signals, and ends with its parent process.

    A SIGTERM from the parent process ends the worker: Python's exit sends SIGTERM to all remaining workers, for example after
    an exception in validation, and waits for them. Where the sender of a signal is not known (macOS), any SIGTERM ends the
    worker.
    """
    for signum in _SIGNALS:
        if signum != signal.SIGTERM:
            signal.signal(signum, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if hasattr(signal, "sigtimedwait") and parent is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads that start later inherit it
        threading.Thread(target=_end_with, args=(parent,), name="end-with-parent", daemon=True).start()


def _end_with(parent: Any) -> None:
    """End this worker process when `parent` ends or sends SIGTERM. Runs in a thread, so also while the worker is busy."""
    forked = os.getppid() == parent.pid  # not by a fork server; then only a pipe tells whether the parent lives
    while os.getppid() == parent.pid if forked else parent.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if received is not None and received.si_pid == parent.pid:
            break
    os._exit(0)  # 0: torch reports a worker that fails, and this one was not needed any more


def _can_be_deferred(trainer: Trainer) -> bool:
    """Whether a resumed run can make this step's validation: not at an epoch's end, unless `max_steps` ends training there."""
    ends_by_steps = trainer.global_step == trainer.max_steps and trainer.max_epochs in (None, -1)
    return ends_by_steps or not trainer.is_last_batch


def _wait(pending: tuple[Any, Tensor] | None) -> int:
    if pending is None:
        return 0
    work, result = pending
    work.wait()
    return int(result)

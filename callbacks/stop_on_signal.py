"""Stops training at an optimizer step when the process is told to end."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1")
    if hasattr(signal, name)  # Windows has no SIGUSR1
)


class StopOnSignal(Callback):
    """On SIGTERM, SIGINT or SIGUSR1, to any rank or several: finish the optimizer step, save, stop. A second SIGINT
    interrupts at once (KeyboardInterrupt).

    The handler sets a flag and nothing else. After each optimizer step the ranks ask each other whether any of them has
    it, so all stop after the same one: on CPU that step, on accelerators the one after, where the answer to the question
    of the step before is read, so that neither host nor device ever waits for it. A signal during validation waits until
    the step that follows it. A validation that is due at the last step is made; that which Lightning adds to every early
    stop is not. `min_steps` and `min_epochs` do not hold the stop up.

    For the program around it: `stopped_by` is the signal's name after an interrupted `fit` and None after a complete one.
    Then exit with `exit_code`: 75 (EX_TEMPFAIL of sysexits.h: try again), but 0 in processes that Lightning itself
    started, because rank 0 kills itself when one of those fails. For callbacks that save: `save_now` is True from the
    moment of the decision, in on_train_batch_end (StepCheckpoint saves then, or at the end of training at the latest).

    A signal to a whole process group (Ctrl-C, schedulers) also reaches the workers of data loaders, and a run cannot go on to
    the end of its step without them: give the loaders `worker_init_fn=ignore_signals` from this file.

    It takes the place of what Lightning does about signals (SIGTERM: exception, no checkpoint, exit code 0; SLURM
    auto-requeue: saves inside a step), including the broadcast by which Lightning's ranks tell each other of a SIGTERM before
    every micro-batch.

    Logs: nothing.

    Contract:
        setup: makes Lightning's own handler for SIGTERM, which is there shortly before ours, only take notice: it broadcasts,
            which hangs when one rank alone is told.
        on_train_start: installs the handlers over Lightning's. A SIGTERM that came in between counts. Lightning puts the
            earlier handlers back when `fit` ends, after everything is saved: a signal while the last checkpoint is being
            written does not break it off.
        on_train_batch_end: after each optimizer step, the question and, when there is an answer, the stop.
        on_train_end: nobody leaves while others ask.
        teardown, on_exception: gives Lightning its broadcasts back.
        State: none.
    Cost: nothing on one process; on several one all-reduce a step, as long as each of the broadcasts that it removes (0.2 to
    0.5 ms between two busy CPU processes), and no wait for it on accelerators.

    `fit` in a thread other than the main one cannot have handlers: a warning says so.
    """

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        self.save_now = False
        self.exit_code = 75
        self._received = 0  # number of the last signal
        self._interrupted = False  # by a first SIGINT
        self._installed = False
        self._step = 0
        self._group: Any = None
        self._lags = False
        self._question: tuple[Any, Tensor] | None = None  # all-reduce under way, and its result
        self._minima: tuple[int | None, int | None] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        connector = trainer._signal_connector

        def take_notice(signum: int, frame: FrameType | None) -> None:
            connector.received_sigterm = True

        connector._sigterm_notifier_fn = take_notice  # type: ignore[method-assign,assignment]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stopped_by, self.save_now, self._received, self._question = None, False, 0, None
        self._interrupted = False
        self._step = trainer.global_step
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            rank_zero_warn("StopOnSignal does nothing: signals reach only the main thread, and fit runs in another.")
            return
        for signum in _SIGNALS:
            signal.signal(signum, self._handle)
        connector = trainer._signal_connector
        if connector.received_sigterm:
            self._received, connector.received_sigterm = signal.SIGTERM, False
        environment = getattr(trainer.strategy, "cluster_environment", None)
        started_by_lightning = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
        self.exit_code = 0 if started_by_lightning else 75
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # Its own group of the CPU: the device has no part in it, and no order with other collectives to keep.
            self._group = dist.new_group(backend="gloo")
            self._lags = trainer.strategy.root_device.type != "cpu"
            loop = trainer.fit_loop.epoch_loop
            if hasattr(loop, "_broadcast_sigterm_tensor"):
                loop._broadcast_sigterm_tensor = _no_broadcast  # type: ignore[method-assign]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self._received = signum
        name = signal.Signals(signum).name
        again = "; once more stops at once" if signum == signal.SIGINT else ""
        # Not print: the handler may have interrupted one.
        os.write(2, f"{name}: stopping after this optimizer step{again}.\n".encode())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._installed or self.save_now or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        signum = self._ask()
        if signum and self._step != trainer.max_steps:  # it was the last one anyway
            self._stop(trainer, signum)

    def _ask(self) -> int:
        """A signal that some rank has received, the same on all, or 0."""
        if self._group is None:
            return self._received
        answered, mine = self._question, torch.tensor(self._received)
        self._question = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True), mine
        if not self._lags:
            answered, self._question = self._question, None
        return _wait(answered)

    def _stop(self, trainer: Trainer, signum: int) -> None:
        self.stopped_by = signal.Signals(signum).name
        self.save_now = True
        loop = trainer.fit_loop
        assert loop._data_fetcher is not None
        # Asked before should_stop is set, which would make every answer yes.
        loop.epoch_loop._skip_next_val = not loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        self._minima = loop.min_epochs, loop.epoch_loop.min_steps
        loop.min_epochs, loop.epoch_loop.min_steps = None, None
        trainer.should_stop = True
        rank_zero_info(f"{self.stopped_by}: training stops after optimizer step {trainer.global_step}.")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _wait(self._question)
        self._question = None
        if self._minima is not None:
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = self._minima
            self._minima = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._give_back(trainer)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back(trainer)
        self._group = None  # another rank may be gone: no goodbye

    def _give_back(self, trainer: Trainer) -> None:
        vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)


def ignore_signals(worker_id: int) -> None:
    """A DataLoader's `worker_init_fn`: the worker leaves signals to the process that it works for, and ends with it."""
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _no_broadcast() -> None:
    """In place of Lightning's: `received_sigterm` is never set here."""


def _wait(question: tuple[Any, Tensor] | None) -> int:
    if question is None:
        return 0
    work, result = question
    work.wait()
    return int(result)

"""Lets training go on when a logger cannot write."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from ._lightning import wrap

RETRY_SECONDS = 30.0
"""Seconds between two attempts of a failed logger to write again."""
_PROBE = bytes(2**16)
_METHODS = ("log_hyperparams", "log_graph", "save")


class LoggerErrors(Callback):
    """If a logger raises an OSError (full or read-only disk, deleted folder, lost connection), drops its rows and trains on.

    The first error is a warning. Until the logger can write again, its rows are dropped and counted. Every 30 seconds the
    next row tests whether the logger's folder can be written; if so, a TensorBoardLogger continues in a new event file. A
    deleted folder is not made again. Errors of other kinds are raised as before.

    Covered: the methods of every logger, and the methods of TensorBoard's `logger.experiment`, whoever calls them.

    Logs: nothing. Warns when a logger fails, when it writes again, and at the end if rows were lost. TensorBoard writes in a
    thread, so a row just before the error may be lost, too.

    Contract:
        setup: wraps the methods of the trainer's loggers. They stay wrapped: loggers are finalized after all hooks.
        State: none.

    List this callback before callbacks that write to loggers in `setup`.
    """

    def __init__(self) -> None:
        self._guards: list[_Guard] = []
        if threading.excepthook is not _report_thread:
            global _reporter
            _reporter, threading.excepthook = threading.excepthook, _report_thread

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            if not any(guard.logger is logger for guard in self._guards):
                self._guards.append(_Guard(logger, writes=trainer.is_global_zero))

    @property
    def lost(self) -> int:
        """Number of rows that were not written, over all loggers."""
        return sum(guard.lost for guard in self._guards)


class _Guard:
    """Wraps the methods of one logger, and drops its rows while the logger cannot write.

    Args:
        writes: whether this rank writes. The TensorBoardLogger of any other rank has a dummy writer.
    """

    def __init__(self, logger: Logger, *, writes: bool) -> None:
        self.logger, self.name = logger, type(logger).__name__
        self.lost = 0
        self.error: OSError | None = None  # why the logger cannot write now
        self._trying = False
        self._retry_at = 0.0
        self._writer = logger.experiment if isinstance(logger, TensorBoardLogger) and writes else None
        for name in _METHODS:
            if callable(getattr(logger, name, None)):
                wrap(logger, name, self._call)
        wrap(logger, "log_metrics", self._log_metrics)
        wrap(logger, "finalize", self._finalize)
        for name in dir(self._writer):
            if name.startswith("add_") or name in ("flush", "close"):
                wrap(self._writer, name, self._call)

    def _call(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the logger's method `inner`, and return its result; None after an OSError, or while the logger cannot write."""
        if self._trying:  # called by the method that is tried again below
            return inner(*args, **kwargs)
        again = self.error is not None
        if again and not self._may_try():
            return None
        self._trying = again
        try:
            result = inner(*args, **kwargs)
            if again and self._writer is not None:
                type(self._writer).flush(self._writer)  # returns when its thread has written
        except OSError as error:
            self._fail(error)
            return None
        finally:
            self._trying = False
        if again:
            self.error = None
            rank_zero_warn(f"{self.name} writes again. It has lost about {self.lost} rows.")
        return result

    def _may_try(self) -> bool:
        """Test whether the logger's folder can be written. False, without a test, for `RETRY_SECONDS` after each test."""
        if time.monotonic() < self._retry_at:
            return False
        self._retry_at = time.monotonic() + RETRY_SECONDS
        folder = getattr(self.logger, "log_dir", None) or self.logger.save_dir
        if folder is not None:
            try:
                with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                    if file.write(_PROBE) < len(_PROBE):
                        return False
            except OSError:
                return False
        if self._writer is not None:
            self._writer.file_writer = self._writer.all_writers = None  # it opens a new file for the next value
        return True

    def _fail(self, error: OSError) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if self.error is None:
            self.lost += 1  # the current row; TensorBoard's thread may have lost the one before, too
            rank_zero_warn(
                f"{self.name} cannot write: {error.strerror or error}. Training goes on without its rows. It is tried again "
                f"every {RETRY_SECONDS:.0f} s: make room on the disk, or restore the folder."
            )
        self.error = error

    def _log_metrics(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        failed_before = self.error is not None
        self._call(inner, *args, **kwargs)
        self.lost += failed_before and self.error is not None

    def _finalize(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._call(inner, *args, **kwargs)
        if self.lost:
            rank_zero_warn(f"{self.name} could not write about {self.lost} rows. The curves have gaps there.")


_reporter: Callable[[threading.ExceptHookArgs], Any] = threading.excepthook


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Report an exception in a thread, but not an OSError of TensorBoard's writer thread, which the writer will raise again."""
    if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__name__ == "_AsyncWriterThread"):
        _reporter(failed)

"""The end of a process: whatever its threads, exit handlers and child processes do, it ends in seconds, with its exit code.

When a command has ended, its result or its error is printed and its files are written: a thread of a checkpoint that is still
being saved is waited for before. What may remain then is not worth a machine: a data loader worker that does not answer, a
library's thread, an exit handler that waits for another rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from lit_llm.core.errors import report, unsaid
from lit_llm.core.ranks import is_first_here
from lit_llm.training.output_streams import lost_output, survive_lost_output

SECONDS = 20.0
"""How long the end of a process may take."""
FIRST_RANK_SECONDS = 10.0
"""How long a process that has failed waits for the end of the first one on its machine, less than `progress_watch.PATIENCE`."""
LAUNCHER = "LIT_LLM_LAUNCHER"
"""Environment variable: the process that launched this one as a further rank of its run."""


def run_and_end(command: Callable[[], int], *, needs_output: bool = True) -> NoReturn:
    """Run a command and end this process with its exit code, or 1 after an exception; at most `SECONDS` later.

    The interpreter's own end is left out after its exit handlers: destructors of process groups can wait or abort there.
    Under a debugger nothing is bounded.

    Args:
        needs_output: Whether the command has failed if a full disk took part of what it printed.
    """
    survive_lost_output()
    try:
        code = command()
    except SystemExit as exit:
        _ending.begin(exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1)
        raise
    except BaseException:
        _ending.begin(1)
        raise  # the interpreter prints it
    if code == 0 and (why := lost_output()) is not None:
        report(f"standard output cannot be written: {why}", kind="error" if needs_output else "warning")
        code = 2 if needs_output else 0
    if code not in (0, 130) and not is_first_here():
        _let_the_first_rank_end()
    _ending.begin(code)
    sys.exit(code)


def _let_the_first_rank_end() -> None:
    """It says why the run ends, and torchrun ends it as soon as another process has failed. If it does not end, say it here."""
    try:
        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        with socket.create_connection((address, port), FIRST_RANK_SECONDS) as store:
            store.recv(1)  # returns when rank 0 has ended, which has the store; torchrun's agent ends this process before
    except TimeoutError:
        for line in unsaid:
            print(line, file=sys.stderr)
    except (OSError, ValueError, OverflowError):  # rank 0 has ended, or MASTER_PORT is no port
        pass


class _Ending:
    def __init__(self) -> None:
        self.code: int | None = None

    def begin(self, code: int) -> None:
        if sys.gettrace() is not None or sys.flags.inspect:
            return  # somebody looks at the process
        self.code = code
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends the process at once, without a traceback
        _flush()
        with contextlib.suppress(RuntimeError):  # no further thread is allowed (ulimit -u)
            threading.Thread(target=self._watch, name="bounded-exit", daemon=True).start()
        with contextlib.suppress(Exception):  # where something holds the interpreter's lock; a thread of C, with exit code 1
            faulthandler.dump_traceback_later(SECONDS + 10, exit=True, file=2)

    def _watch(self) -> None:
        time.sleep(SECONDS)
        us = (threading.current_thread(), threading.main_thread())
        left = [f"thread {thread.name}" for thread in threading.enumerate() if thread not in us and not thread.daemon]
        what = ", ".join(left) or "an exit handler"
        end(self.code or 0, f"warning: this process had not ended {SECONDS:.0f} s after its command and is ended now: {what}")

    def finish(self) -> None:
        if self.code is not None:
            _flush()
            os._exit(self.code)


_ending = _Ending()
# Called in reverse order: this one is registered before those of multiprocessing and torch, so it is the last.
atexit.register(_ending.finish)


def launches_ranks() -> None:
    """Called before this process launches further ranks, so that `end_with_launcher` recognises it."""
    os.environ[LAUNCHER] = str(os.getpid())


def end_with_launcher() -> None:
    """If this process was launched as a further rank: end it `SECONDS` after its launcher at the latest.

    A rank that waits for another one notices its end at once, and says so. A rank that waits for something else does not,
    and a rank that connects for the first time may wait half an hour. The launcher may have ended before this call.
    """
    if launcher := int(os.environ.pop(LAUNCHER, "0")):
        threading.Thread(target=_end_after, args=(launcher,), name="launcher-watch", daemon=True).start()


def _end_after(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    time.sleep(SECONDS)
    end(1, f"warning: process {launcher}, which launched this rank, has ended: this one is ended too")


def end(code: int, why: str) -> NoReturn:
    """End this process now."""
    os.write(2, f"{why}\n".encode())
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed pipe, a closed stream, no stream
            stream.flush()

"""Ends a process in seconds and with its exit code, whatever its threads, exit handlers and child processes do.

When a command returns, it has printed its result or error, written its files, and waited for the thread that saves a
checkpoint. Threads and exit handlers that still run some seconds later are killed.
"""

from __future__ import annotations

import atexit
import contextlib
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
"""Seconds that the end of a process may take after its command has returned."""
FIRST_RANK_SECONDS = 10.0
"""Seconds that a failed process waits for rank 0 to end; less than `progress_watch.PATIENCE`."""
LAUNCHER = "LIT_LLM_LAUNCHER"
"""Name of an environment variable: the id of the process that launched this process as another rank of its run."""


def run_and_end(command: Callable[[], int], *, needs_output: bool = True) -> NoReturn:
    """Run a command, and end this process at most `SECONDS` later, with the command's exit code, or 1 after an exception.

    After exit handlers, the interpreter's own shutdown is skipped: in it, destructors of process groups can hang or abort.
    Under a debugger there is no time limit.

    Args:
        needs_output: Whether the exit code is 2 if printed text could not be written to standard output, as on a full disk.
            If false, this only prints a warning.
    """
    survive_lost_output()
    try:
        code = command()
    except BaseException as error:  # the interpreter prints it
        why = error.code if isinstance(error, SystemExit) else 1
        _begin_end(why if isinstance(why, int) else int(why is not None))
        raise
    if code == 0 and (why := lost_output()) is not None:
        report(f"standard output cannot be written: {why}", kind="error" if needs_output else "warning")
        code = 2 if needs_output else 0
    if code not in (0, 130) and not is_first_here():
        _let_the_first_rank_end()
    _begin_end(code)
    sys.exit(code)


def _let_the_first_rank_end() -> None:
    """Wait until rank 0 has printed why the run ends, and has ended: torchrun kills all processes once this process ends.

    If rank 0 has not ended after `FIRST_RANK_SECONDS`, print the reason in this process.
    """
    try:
        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        with socket.create_connection((address, port), FIRST_RANK_SECONDS) as store:
            store.recv(1)  # returns when rank 0, the store's host, has ended; an agent of torchrun ends this process before
    except TimeoutError:
        for line in unsaid:
            print(line, file=sys.stderr)
    except (OSError, ValueError, OverflowError):  # rank 0 has ended, or MASTER_PORT is no port
        pass


_code: int | None = None


def _begin_end(code: int) -> None:
    """Make this process end with exit code `code`: by itself, or, after `SECONDS`, by a thread that this function starts."""
    global _code
    if sys.gettrace() is not None or sys.flags.inspect:
        return  # a debugger, or `python -i`
    _code = code
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends the process at once, without a traceback
    _flush()
    with contextlib.suppress(RuntimeError):  # no further thread is allowed (ulimit -u)
        threading.Thread(target=_end_later, args=(code,), name="bounded-exit", daemon=True).start()


def _end_later(code: int) -> None:
    time.sleep(SECONDS)
    us = (threading.current_thread(), threading.main_thread())
    left = [f"thread {thread.name}" for thread in threading.enumerate() if thread not in us and not thread.daemon]
    what = ", ".join(left) or "an exit handler"
    end(code, f"warning: this process had not ended {SECONDS:.0f} s after its command and is ended now: {what}")


def _finish() -> None:
    if _code is not None:
        _flush()
        os._exit(_code)


# Exit handlers run in reverse order: this one is registered before those of multiprocessing and torch, so it runs last.
atexit.register(_finish)


def launches_ranks() -> None:
    """Store this process's id in the environment variable `LAUNCHER`, which `end_with_launcher` reads in launched ranks."""
    os.environ[LAUNCHER] = str(os.getpid())


def end_with_launcher() -> None:
    """If another process of the run launched this process, end this process about `SECONDS` after that launcher has ended.

    A rank in a collective notices the end of another rank at once. A rank that waits for anything else does not, and a rank
    that connects for the first time may wait half an hour. The launcher may have ended before this call.
    """
    if launcher := int(os.environ.pop(LAUNCHER, "0")):
        threading.Thread(target=_end_after, args=(launcher,), name="launcher-watch", daemon=True).start()


def _end_after(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    time.sleep(SECONDS)
    end(1, f"warning: process {launcher}, which launched this rank, has ended: this one is ended too")


def end(code: int, why: str) -> NoReturn:
    """Print `why` to standard error, and end this process at once with exit code `code`, without exit handlers."""
    os.write(2, f"{why}\n".encode())
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a closed stream
            stream.flush()

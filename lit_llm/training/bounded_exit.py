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
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lit_llm.core.errors import is_first_here, report, unsaid
from lit_llm.training.output_streams import lost_output, survive_lost_output

SECONDS = 20.0
"""How long the end of a process may take."""
FIRST_RANK_SECONDS = 10.0
"""How long a process that has failed waits for the end of the first one on its machine, less than `progress_watch.PATIENCE`."""
_LAUNCHER = "LIT_LLM_LAUNCHER"
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
    first, until = _first_rank(), time.monotonic() + FIRST_RANK_SECONDS
    while first is not None and _is_running(first):
        if time.monotonic() > until:
            for line in unsaid:
                print(line, file=sys.stderr)
            return
        time.sleep(0.05)


def _first_rank() -> int | None:
    """The process that launched this one as a rank, or the first one with the same launcher. None: it has ended."""
    launcher, port = os.getppid(), f"MASTER_PORT={os.environ.get('MASTER_PORT')}".encode()
    if os.environ.get(_LAUNCHER) == str(launcher):
        return launcher
    for pid in _children(launcher):
        with contextlib.suppress(OSError):  # it has ended
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            values = dict(variable.partition(b"=")[::2] for variable in variables)
            # Within a SLURM job, processes of torchrun have SLURM's variables, too. srun sets no port; Lightning does, later.
            is_first = values.get(b"LOCAL_RANK", values.get(b"SLURM_LOCALID")) == b"0" and pid != os.getpid()
            if is_first and (port in variables or b"LOCAL_RANK" not in values):
                return pid
    return None


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
        left += [f"child process {pid}" for pid in _children()]
        what = ", ".join(left) or "an exit handler"
        _end(self.code or 0, f"this process had not ended {SECONDS:.0f} s after its command and is ended now: {what}")

    def finish(self) -> None:
        if self.code is not None:
            _flush()
            os._exit(self.code)


_ending = _Ending()
# Called in reverse order: this one is registered before those of multiprocessing and torch, so it is the last.
atexit.register(_ending.finish)


def launches_ranks() -> None:
    """Called before this process launches further ranks, so that `end_with_launcher` recognises it."""
    os.environ[_LAUNCHER] = str(os.getpid())


def end_with_launcher() -> None:
    """If this process was launched as a further rank: end it `SECONDS` after its launcher at the latest.

    A rank that waits for another one notices its end at once, and says so. A rank that waits for something else does not,
    and a rank that connects for the first time may wait half an hour. The launcher may have ended before this call.
    """
    launcher = int(os.environ.get(_LAUNCHER, "0"))
    if launcher and (launcher == os.getppid() or not _is_running(launcher)):
        threading.Thread(target=_end_after, args=(launcher,), name="launcher-watch", daemon=True).start()


def _end_after(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    time.sleep(SECONDS)
    _end(1, f"process {launcher}, which launched this rank, has ended: this one is ended too")


def _end(code: int, why: str) -> None:
    """End this process and its children now."""
    os.write(2, f"warning: {why}\n".encode())
    for pid in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(code)


def _is_running(pid: int) -> bool:
    """Whether a process runs. One that has ended and was not waited for (a zombie) does not."""
    with contextlib.suppress(OSError):  # no such process, or no /proc
        return _fields(pid)[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _children(of: int | None = None) -> list[int]:
    """Child processes of a process, or of this one; none where there is no /proc."""
    of = os.getpid() if of is None else of
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent = _fields(process.name)[:2]
            if int(parent) == of and state != "Z":
                found.append(int(process.name))
    return sorted(found)


def _fields(pid: int | str) -> list[str]:
    """State, parent and what else the kernel says of a process after its name, which need not be text."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed pipe, a closed stream, no stream
            stream.flush()

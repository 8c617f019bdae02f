"""Standard output and standard error: if text cannot be written (full disk, no reader), it is lost, but the run goes on.

With `fit --log_dir`, each rank has a log file, which also gets the text that C++ code writes to file descriptors 1 and 2.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from lit_llm.core.disk import NO_ROOM
from lit_llm.core.errors import UserError

_LOST = NO_ROOM | {errno.EIO, errno.EPIPE}


def survive_lost_output() -> None:
    """Replace stdout and stderr so that `print` raises no error if one cannot be written, lost its reader, or is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process runs
        elif isinstance(stream, io.TextIOWrapper):
            stream.flush()
            replaced = io.TextIOWrapper(
                io.BufferedWriter(LossyFile(stream.fileno())),
                encoding=stream.encoding,
                errors="backslashreplace",  # for characters that the terminal's encoding lacks
                # PYTHONUNBUFFERED asks for write_through, which ends in the buffer: a killed process would lose its last lines.
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, replaced)


def lost_output() -> str | None:
    """Why a part of the text printed to stdout is lost; None if nothing is lost, or if a pipe's reader has closed the pipe."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.lost if isinstance(raw, LossyFile) else None


class LossyFile(io.RawIOBase):
    """A raw file on a file descriptor that drops data it cannot write. Sets `lost` to the reason, except for a closed pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.lost: str | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            if error.errno != errno.EPIPE:
                self.lost = error.strerror
            return len(data)


def log_to(folder: Path, rank: int, ranks: int) -> None:
    """From now on, append this process's stdout and stderr to `folder/rank-N.log`. Rank 0 also writes to its terminal.

    On rank 0, two small processes (`tee`) copy the output. They end when this process ends, in whatever way.

    Raises:
        UserError: The log file cannot be written.
    """
    path = folder / f"rank-{rank}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except FileExistsError:
        raise UserError(f"log_dir {str(folder)!r} is a file, but must be a folder: give another path (--log_dir DIR)") from None
    except OSError as error:
        raise UserError(f"log_dir {str(folder)!r} cannot have {path.name}: {error.strerror} (--log_dir DIR)") from None
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    os.write(log, f"---- {now}, rank {rank} of {ranks}, process {os.getpid()} on {socket.gethostname()}\n".encode())
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        if rank == 0:
            _copy(descriptor, path)
        else:
            os.dup2(log, descriptor)
        if isinstance(stream, io.TextIOWrapper):  # a notebook's stream has no buffer of lines
            stream.reconfigure(line_buffering=True)
    os.close(log)


def _copy(descriptor: int, path: Path) -> None:
    """Make a file descriptor a pipe to a new process, which copies to the descriptor's old target and to the log at `path`.

    The new process has its own session and ignores signals that a terminal or a scheduler sends to every process. So it ends
    only when the last process that writes to the pipe has ended.
    """
    command = ["sh", "-c", 'trap "" HUP INT PIPE TERM; exec tee -a "$1"', "sh", str(path)]
    copying = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=descriptor, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert copying.stdin is not None
    os.dup2(copying.stdin.fileno(), descriptor)
    copying.stdin.close()
    copying.returncode = 0  # Popen then never waits for the process

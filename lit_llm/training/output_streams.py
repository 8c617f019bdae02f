"""Standard output and error that cannot be written, as on a full disk or without a reader: text is lost, not the run."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

from lit_llm.core.disk import NO_ROOM

_LOST = NO_ROOM | {errno.EIO, errno.EPIPE}


def survive_lost_output() -> None:
    """Let `print` go on if stdout or stderr cannot be written, has lost its reader, or was closed before the start."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process runs
        elif isinstance(stream, io.TextIOWrapper):
            stream.flush()
            replaced = io.TextIOWrapper(
                io.BufferedWriter(LossyFile(stream.fileno())),
                encoding=stream.encoding,
                errors="backslashreplace",  # of characters that the terminal's encoding lacks
                # PYTHONUNBUFFERED asks for write_through, which ends in the buffer: a killed process would lose its last lines.
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, replaced)


def lost_output() -> str | None:
    """Why part of what was printed is lost; None if nothing is, or if a reader had read enough."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.lost if isinstance(raw, LossyFile) else None


class LossyFile(io.RawIOBase):
    """Writes to a descriptor, and drops what cannot be written. `lost`: why, if anything but a pipe without a reader."""

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

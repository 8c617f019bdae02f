"""Standard output and error into a file: a full disk loses text, not the run."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Collection
from typing import Any

from lit_llm.disk import NO_ROOM

_LOST = NO_ROOM | {errno.EIO}


def survive_lost_output(*, without_reader: bool) -> None:
    """Let `print` go on if stdout or stderr is a file that cannot be written, or was closed before the start.

    Args:
        without_reader: Also if it is a pipe or terminal that nobody reads any more, as after a lost ssh connection.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process runs
        elif isinstance(stream, io.TextIOWrapper) and _is_covered(stream, without_reader):
            stream.flush()
            replaced = io.TextIOWrapper(
                io.BufferedWriter(LossyFile(stream.fileno(), drop=_LOST | ({errno.EPIPE} if without_reader else set()))),
                encoding=stream.encoding,
                errors=stream.errors,
                # PYTHONUNBUFFERED asks for write_through, which ends in the buffer: a killed process would lose its last lines.
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, replaced)


def _is_covered(stream: io.TextIOWrapper, without_reader: bool) -> bool:
    mode = os.fstat(stream.fileno()).st_mode
    return stat.S_ISREG(mode) or (without_reader and stat.S_ISFIFO(mode))


class LossyFile(io.RawIOBase):
    """Writes to a descriptor, and drops what cannot be written because of one of the errors `drop`."""

    def __init__(self, descriptor: int, drop: Collection[int] = _LOST) -> None:
        self._descriptor, self._drop = descriptor, drop

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno in self._drop:
                return len(data)
            raise

"""Standard output and error into a file: a full disk loses text, not the run."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import Any

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def survive_full_disks() -> None:
    """Let `print` go on if stdout or stderr is a file that cannot be written. Terminals and pipes stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.flush()
            replaced = io.TextIOWrapper(
                io.BufferedWriter(LossyFile(stream.fileno())),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, replaced)


class LossyFile(io.RawIOBase):
    """Writes to a descriptor, and drops what does not fit on the disk."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return len(data)
            raise

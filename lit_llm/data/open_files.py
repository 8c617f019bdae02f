"""Read bytes of many files with few open descriptors.

``os.pread`` takes the position in every call, so processes that share a descriptor after a fork do not disturb each other.
Unlike a memory map, ``os.pread`` reads no pages around the requested bytes, and causes no SIGBUS if a file becomes shorter.
"""

from __future__ import annotations

import itertools
import os
from functools import lru_cache

from lit_llm.core.errors import UserError

_MOST = 128
"""The most file descriptors that stay open in a process. By default, a process may have 1,024 (``ulimit -n``)."""
_new_key = itertools.count()


class OpenFiles:
    """Reads files for one owner, such as a stream. All objects of this class in a process keep at most 128 descriptors open.

    Pickling transfers no descriptor: the unpickled copy opens the files again.
    """

    def __init__(self) -> None:
        self._key = next(_new_key)  # an `OpenFiles` made later has another key, so it opens a replaced file again

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()

    def read(
        self, path: str, start: int, length: int, *, random: bool, mend: str = "restore it, and continue the run"
    ) -> bytes:
        """Read ``length`` bytes of the file ``path`` from byte ``start`` on.

        Args:
            random: tell the kernel not to read ahead, because the next read is elsewhere.
            mend: the advice in the error about a file that is gone or became shorter; the message adds "with --resume auto".

        Raises:
            UserError: the file is gone, or became shorter.
            OSError: the file cannot be opened or read.
        """
        try:
            file = _opened(self._key, path, random)
        except FileNotFoundError:
            raise UserError(f"{path} is gone: {mend} with --resume auto.") from None
        content = os.pread(file.descriptor, length, start)
        while len(content) < length and (more := os.pread(file.descriptor, length - len(content), start + len(content))):
            content += more  # file systems over a network may return less than they have
        if len(content) < length:
            raise UserError(
                f"{path} became shorter: {os.path.getsize(path)} bytes now, but bytes up to {start + length} are read: "
                f"{mend} with --resume auto."
            )
        return content


class _File:
    """An open descriptor, which is closed when the last reference to this object is gone."""

    def __init__(self, path: str, *, random: bool) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if random:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


@lru_cache(maxsize=_MOST)
def _opened(key: int, path: str, random: bool) -> _File:
    return _File(path, random=random)

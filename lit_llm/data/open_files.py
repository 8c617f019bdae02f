"""Read bytes of many files with few open descriptors.

``os.pread`` names its position in every call, so processes that share a descriptor after a fork do not disturb each other.
Unlike a memory map, it reads no pages around the ones it is asked for, and a file that becomes shorter is no SIGBUS.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource

from lit_llm.core.disk import open_ordinary
from lit_llm.core.errors import UserError

_SHARE = 4  # of the descriptors that a process may open, at most this part are kept here
_MOST = 2**16  # where the system sets no limit

_new_key = itertools.count()


class OpenFiles:
    """The files of one reader. All readers of a process share one budget: a quarter of its descriptors (``ulimit -n``).

    Pickling transfers no descriptors. Several threads may read at the same time.
    """

    def __init__(self) -> None:
        self._key = next(_new_key)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()

    def read(
        self, path: str, start: int, length: int, *, random: bool, mend: str = "restore it, and continue the run"
    ) -> bytes:
        """``length`` bytes of ``path`` from ``start`` on.

        Args:
            random: tell the kernel not to read ahead, because the next read is elsewhere.
            mend: what a user does about a file that has changed while it was being read.

        Raises:
            UserError: the file is gone, or became shorter.
            OSError: the file cannot be opened or read.
        """
        try:
            content = self._read(path, start, length, random)
            if len(content) < length:
                raise UserError(
                    f"{path} became shorter: {os.path.getsize(path)} bytes now, but bytes up to {start + length} are read: "
                    f"{mend} with --resume auto."
                )
        except FileNotFoundError:
            raise UserError(f"{path} is gone: {mend} with --resume auto.") from None
        return content

    def _read(self, path: str, start: int, length: int, random: bool) -> bytes:
        key = (self._key, path, random)
        # This reference keeps the descriptor open while another thread drops it from the cache.
        file = _files.get(key)
        if file is None:
            while len(_files) >= _budget():
                _drop_oldest()
            file = _files[key] = _File(path, random=random)
        content = os.pread(file.descriptor, length, start)
        while len(content) < length and (more := os.pread(file.descriptor, length - len(content), start + len(content))):
            content += more  # file systems over a network may return less than they have
        return content


class _File:
    """An open descriptor, closed with its last reference."""

    def __init__(self, path: str, *, random: bool) -> None:
        self.descriptor = -1
        self.descriptor = open_ordinary(path)
        if random:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


# The oldest first, and dropped first. For random reads that is as good as the least recently used, and half the cost. A plain
# dict: threads that change an OrderedDict at the same time can leave it with a length, but without a first item.
_files: dict[tuple[int, str, bool], _File] = {}


def _drop_oldest() -> None:
    with contextlib.suppress(StopIteration, RuntimeError):  # another thread has emptied or changed it
        _files.pop(next(iter(_files)), None)


def _budget() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(soft // _SHARE, _MOST))

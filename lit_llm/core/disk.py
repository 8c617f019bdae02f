"""Writing small files whole, and telling an error of the disk from a bug. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lit_llm.callbacks import ordinary_files
from lit_llm.callbacks.ordinary_files import (  # noqa: F401  # other rooms import these from here
    UnusableFile,
    new_file,
    open_ordinary,
    ordinary_file,
    read_json,
    read_ordinary,
    replace_file,
)

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Error numbers of a disk that takes no more: full, over the quota, a file too large, read-only."""
_DISK = NO_ROOM | {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk refused: full, over the quota, read-only, no permission, or broken."""
    return isinstance(error, OSError) and error.errno in _DISK


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add a name to an error of the disk. Python names a file that cannot be opened, not one that cannot be written."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or not is_disk_error(error):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of a text in UTF-8."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent: an existing one is replaced by one rename.

    Raises:
        OSError: The disk refused. `path` is unchanged and nothing partial remains.
    """
    with naming(path):
        replace_file(path, content)


@contextlib.contextmanager
def complete_file(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """`ordinary_files.complete_file`, with the name of the file in its errors."""
    with naming(path), ordinary_files.complete_file(path, partial) as file:
        yield file


def real_path(path: str | os.PathLike[str]) -> Path:
    """`Path.resolve`, which before Python 3.13 raises RuntimeError where links go round in a circle."""
    return Path(os.path.realpath(path))


def delete(path: Path) -> None:
    """Delete a file, link or folder; errors are ignored."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        shutil.rmtree(path, ignore_errors=True)

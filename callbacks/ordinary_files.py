"""Files that somebody else may have put there: opened only if they are ordinary files, and read up to a limit.

A pipe makes a reader wait for ever, and /dev/zero never ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from .errors import UserError

TEXT_BYTES = 64 * 2**20
"""Limit of a file that is read whole, such as a tokenizer: the largest in use have 35 MB."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Error numbers of a disk that takes no more: full, over the quota, a file too large, read-only."""
_DISK = NO_ROOM | {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG}


_NOT_ORDINARY = "it is a pipe, socket or device, not an ordinary file"


class UnusableFile(OSError, UserError):
    """A folder, pipe, device or link in place of a file, or a file that is too large."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be used: {self.strerror}"


def open_ordinary(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """The descriptor of an ordinary file, opened without waiting for anybody.

    Raises:
        OSError: It cannot be opened; `UnusableFile`: it is a folder, pipe or device, or with O_NOFOLLOW a link.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)  # a pipe must not wait for its other end
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise UnusableFile(errno.EINVAL, "it is a link, not an ordinary file", os.fspath(path)) from None
        if error.errno == errno.ENXIO:
            raise UnusableFile(errno.EINVAL, _NOT_ORDINARY, os.fspath(path)) from None
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    what = "it is a folder, not a file" if stat.S_ISDIR(kind) else _NOT_ORDINARY
    raise UnusableFile(errno.EINVAL, what, os.fspath(path))


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file.

    Raises:
        OSError: It cannot be opened; `UnusableFile`: something else is in its place.
    """
    if not os.path.lexists(path):
        return False
    if not os.path.exists(path):
        raise UnusableFile(errno.ENOENT, "it is a link to nothing", os.fspath(path))
    os.close(open_ordinary(path))
    return True


def read_ordinary(path: str | os.PathLike[str], most: int = TEXT_BYTES) -> bytes:
    """The content of an ordinary file of at most `most` bytes.

    Raises:
        OSError: It cannot be read; `UnusableFile`: it is a folder, pipe or device, or larger.
    """
    with open(open_ordinary(path), "rb") as file:
        content = file.read(most + 1)
    if content is None:  # a file of the kernel that waits for what is to come
        raise UnusableFile(errno.EAGAIN, "it is no ordinary file: it has no content yet", os.fspath(path))
    if len(content) > most:
        raise UnusableFile(errno.EINVAL, f"it is larger than {most:,} bytes", os.fspath(path))
    return content


def read_json(path: str | os.PathLike[str], most: int = TEXT_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: As `read_ordinary`.
        ValueError: It is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_ordinary(path, most))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_text(path: str | os.PathLike[str], most: int = TEXT_BYTES, *, mend: str = "") -> str:
    """The content of a file of UTF-8 text, without a mark at its start.

    Args:
        mend: the end of the sentence, such as the flag that names the file.

    Raises:
        UserError: It cannot be read, or is not UTF-8.
    """
    try:
        return read_ordinary(path, most).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"{path} cannot be read: {why}{mend}") from None


def read_object(path: str | os.PathLike[str], *, mend: str = "") -> dict[str, Any]:
    """The object in a JSON file. Arguments and errors as of `read_text`."""
    try:
        content = read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}{mend}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}{mend}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object{mend}")
    return content


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk refused: full, over the quota, read-only, no permission, a name that is too long, or broken."""
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


def new_file(path: Path, mode: str = "xb") -> BinaryIO:
    """A file to write, in place of what a killed process has left there. A link of that name is removed, not followed."""
    path.unlink(missing_ok=True)
    return cast(BinaryIO, open(path, mode))


@contextlib.contextmanager
def complete_file(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """A file to write and read. It is at `path` once the block has ended, and at `partial` until then; an error deletes it.

    Raises:
        OSError: The disk refused. `path` is unchanged and nothing partial remains.
    """
    try:
        with naming(path), new_file(partial, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file, as `complete_file`."""
    with complete_file(path, path.with_name(f".{path.name}.partial")) as file:
        file.write(content)


def ordinary_file(path: Path) -> Path:
    """The same path, for a library that opens files itself.

    Raises:
        OSError: As `open_ordinary`.
    """
    os.close(open_ordinary(path))
    return path

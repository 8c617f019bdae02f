"""Reads files, and reports a mistake in a file in one sentence. Writes files so that none is ever left half written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import UserError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Error numbers (`errno`) of a disk that stores no more data: full, over the quota, a file too large, read-only."""
_DISK = NO_ROOM | {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG}


def read_json(path: Path) -> Any:
    """The parsed value of a JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The content is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_text(path: Path, *, mend: str = "") -> str:
    """The content of a file of UTF-8 text, without a byte order mark.

    Args:
        mend: text at the end of the error's sentence, such as the flag that names the file: " (--prompts)".

    Raises:
        UserError: The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"{path} cannot be read: {why}{mend}") from None


def read_object(path: Path, *, mend: str = "") -> dict[str, Any]:
    """The object in a JSON file, as a dict. `mend` is text at the end of an error's sentence, such as the file's flag.

    Raises:
        UserError: The file cannot be read, is not JSON, or its content is not an object.
    """
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
    """Whether `error` is an OSError by which the disk refused a file: the disk is full, over the quota, read-only or broken,
    or there is no permission, or the name is too long."""
    return isinstance(error, OSError) and error.errno in _DISK


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Context manager that adds the file name `path` to an OSError of the disk that names no file.

    Python's OSError names a file that cannot be opened, but not a file that cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or not is_disk_error(error):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def complete_file(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """Context manager: opens the file `partial` to write and read. At its end renames it to `path`; after an error deletes it.

    Raises:
        OSError: The disk refused. `path` is unchanged and `partial` is deleted.
    """
    try:
        with naming(path), open(partial, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to a file. If the disk refuses, this raises OSError, and the file at `path` is unchanged."""
    with complete_file(path, path.with_name(f".{path.name}.partial")) as file:
        file.write(content)


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder to `<name>.1`, `.2`, …; nothing is deleted. Returns the new path; None if nothing is there.

    A broken link is renamed too, because a new file could not take its place.
    """
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.{number}")):
        number += 1
    path.rename(target)
    return target

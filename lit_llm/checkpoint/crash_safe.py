"""Writes files and folders that survive a power failure, by fsync, and computes SHA-256 of files."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

from lit_llm.core.disk import naming


class HashingFile:
    """Context manager for a new file: computes the SHA-256 of the content that is written, and fsyncs the file on exit.

    An OSError in a write is raised on exit, because torch's C++ writer would turn it into an unrelated RuntimeError.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0  # bytes
        self.sha256 = hashlib.sha256()
        self._error: OSError | None = None
        self._path = path
        self._file = open(path, "xb")  # noqa: SIM115  # closed by __exit__

    def write(self, data: bytes | memoryview) -> int:
        """Write `data` and return its number of bytes. After an OSError in an earlier write, nothing is written."""
        if self._error is None:
            try:
                self._file.write(data)
                self.sha256.update(data)
                self.size += len(data)
            except OSError as error:
                self._error = error
        return len(data)

    def flush(self) -> None:
        """Does nothing: torch.save needs the method, and `__exit__` flushes and fsyncs."""

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        with naming(self._path), self._file:  # closing writes the buffer again, and then raises the same error
            if self._error is not None:
                raise self._error
            if value is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex. The file is read in pieces of 1 MiB."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents. The parent of each new folder is fsynced: new folders survive a power failure."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for new in missing:
        fsync_path(new.parent)


def fsync_path(path: Path) -> None:
    """fsync the file or folder `path`. Unless a file's folder is fsynced, too, a power failure can undo a rename of the file.

    Some file systems (FUSE, CIFS) cannot fsync a folder, and answer EINVAL or ENOTSUP. These errors are ignored.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)

"""A file to read: on this machine or remote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_PROTOCOL = "://"


@dataclass(frozen=True)
class Source:
    """A file that exists, as it was when it was listed."""

    path: str
    """A path, or a URL such as s3://bucket/key."""
    size: int
    """Bytes."""
    version: str
    """Differs if the content differs: the modification time of a local file, the ETag or the like of a remote one."""

    @classmethod
    def local(cls, path: Path) -> Source:
        status = path.stat()
        return cls(str(path), status.st_size, str(status.st_mtime_ns))

    @property
    def is_local(self) -> bool:
        return _PROTOCOL not in self.path

    def open(self) -> BinaryIO:
        """The content as a binary file. Its ``tell`` is the number of bytes read so far."""
        return open(self.path, "rb")

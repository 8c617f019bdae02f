"""The description of a file to read: local, remote, or a shard of a dataset of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lit_llm.core.errors import UserError

HUB = "hub:"
"""The prefix of the name of a dataset of the Hugging Face hub."""
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, repr=False)
class Source:
    """Record of a file to read: its path, size and version when it was listed. Can be pickled: it holds no open file."""

    path: str
    """A path, or a URL such as s3://bucket/key. A URL may have a password in it: print and store ``name`` instead."""
    size: int
    """Size in bytes; 0 if the server does not tell it."""
    version: str
    """A text that changes with the content: a local file's modification time, a remote file's ETag or checksum."""

    @classmethod
    def local(cls, path: Path) -> Source:
        return cls(str(path), *state_of(os.stat(path)))

    @property
    def is_local(self) -> bool:
        return not (is_url(self.path) or self.is_hub)

    @property
    def is_hub(self) -> bool:
        """Whether the source is a shard of a dataset of the Hugging Face hub, which is no file: ``readers.hub`` reads it."""
        return self.path.startswith(HUB)

    @property
    def name(self) -> str:
        """The path without what may be secret: a URL's user and password and, over HTTP, its query."""
        return public_name(self.path)

    def __repr__(self) -> str:
        return f"Source({self.name!r}, size={self.size}, version={self.version!r})"


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def is_http(path: str) -> bool:
    return path.lower().startswith(("http://", "https://"))


def public_name(path: str) -> str:
    """``path`` for messages: a URL without user and password and, over HTTP, without its query, which may have a signature."""
    if not is_url(path):
        return path
    protocol, _, rest = path.partition("://")
    host, slash, tail = rest.partition("/")
    name, mark, _ = tail.partition("?") if is_http(path) else (tail, "", "")
    return f"{protocol}://{host.rpartition('@')[2]}{slash}{name}{mark and '?…'}"


def changed(source: Source) -> UserError:
    return UserError(f"{source.name} has changed since this command started: start it again.")


def state_of(status: os.stat_result) -> tuple[int, str]:
    """The size in bytes and the version (modification time in ns) of a local file, from its ``os.stat`` result."""
    return status.st_size, str(status.st_mtime_ns)

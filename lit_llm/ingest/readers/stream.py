"""Binary streams: the first bytes of a stream, read without losing them."""

from __future__ import annotations

import io
from typing import Any, BinaryIO, cast

HEAD_BYTES = 2**16
"""How much of a file decides its format."""


def read_head(stream: BinaryIO) -> bytes:
    """The first ``HEAD_BYTES`` of ``stream``, or all of it. A remote stream may return less than it is asked for."""
    parts, missing = [], HEAD_BYTES
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def with_head(head: bytes, stream: BinaryIO) -> BinaryIO:
    """A stream of ``head`` and what is left of ``stream``. Its ``read(n)`` returns less than n bytes at the end only."""
    return cast(BinaryIO, io.BufferedReader(_WithHead(head, stream), 2**18))


class _WithHead(io.RawIOBase):
    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = head, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        part = self._head[: len(view)] or self._stream.read(len(view))
        self._head = self._head[len(part) :]
        view[: len(part)] = part
        return len(part)

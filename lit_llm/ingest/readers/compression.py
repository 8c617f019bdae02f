"""Decompress gz, bz2, xz and zst as a stream. A file may have several members, as `cat a.gz b.gz` makes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeAlias

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.readers.plain_text import stream_of

_READ_BYTES = 2**16

_STARTS = {  # a zst file may start with a skippable frame
    "gz": re.compile(rb"\x1f\x8b\x08"),
    "bz2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}


_Codec: TypeAlias = tuple[Callable[[], Any], tuple[type[Exception], ...]]
"""A function that makes a decompressor (with ``decompress``, ``eof``, ``unused_data``), and the errors it may raise."""


def compression_of(head: bytes) -> str | None:
    """The compression of a file that starts with ``head``: "gz", "bz2", "xz" or "zst"; else None."""
    return next((name for name, start in _STARTS.items() if start.match(head)), None)


def decompressed(stream: BinaryIO, compression: str, *, name: str) -> BinaryIO:
    """A binary file with the decompressed content of ``stream``, which may be several compressed files, one after the other.

    Args:
        compression: "gz", "bz2", "xz" or "zst".
        name: the file's name, for messages.

    Raises:
        UserError: zstandard is not installed. Reading also raises a UserError, if the file is damaged or truncated, or needs a
            larger window than zstd allows by default.
    """
    return stream_of(_members(stream, *_codec(compression), name))


def _codec(compression: str) -> _Codec:
    if compression == "zst":
        zstandard = need("zstandard", what="A zst file")
        return zstandard.ZstdDecompressor().decompressobj, (zstandard.ZstdError,)
    if compression == "gz":
        return (lambda: zlib.decompressobj(wbits=31)), (zlib.error,)
    if compression == "bz2":
        import bz2

        return bz2.BZ2Decompressor, (OSError, ValueError)
    import lzma

    return lzma.LZMADecompressor, (lzma.LZMAError,)


def _members(stream: BinaryIO, new: Callable[[], Any], errors: tuple[type[Exception], ...], name: str) -> Iterator[bytes]:
    """Yield the decompressed content of all members (compressed files, one after the other) of a stream, in order. ``new``:
    makes a decompressor; ``errors``: the exceptions that it raises for damaged data; ``name``: the stream's name in errors."""
    member: Any = None  # the decompressor of the member that is being read; None between members
    while rest := stream.read(_READ_BYTES):
        while rest:
            if member is None:
                rest = rest.lstrip(b"\0")  # programs pad members to the size of a block
                if not rest:
                    break
                member = new()
            try:
                output = member.decompress(rest)
            except errors as error:
                raise UserError(f"{name} cannot be decompressed ({error}): copy, download or compress it again.") from error
            rest = member.unused_data
            if member.eof:
                member = None
            yield output
    if member is not None:
        raise UserError(f"{name} is truncated: its compressed data end too early. Copy or download it again.")

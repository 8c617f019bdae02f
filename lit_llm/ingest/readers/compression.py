"""Decompress gz, bz2, xz and zst as a stream. A file may have several members, as `cat a.gz b.gz` makes."""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, BinaryIO, TypeAlias

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.readers.plain_text import stream_of

_READ_BYTES = 2**16
# Compressed bytes to decompress at a time. The densest formats (zst, bz2) make at most about 32 MiB of them.
_SLICE_BYTES = 2**10
_MEMBER_HEAD = 18  # bytes: the longest header of a zst frame, which has its window
_LARGEST_ZST_WINDOW = 2**27  # decompressing needs as much memory; `zstd` itself refuses more by default

_STARTS = {  # a zst file may start with a skippable frame
    "gz": re.compile(rb"\x1f\x8b\x08"),
    "bz2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}


_Codec: TypeAlias = tuple[Callable[[bytes], Any], tuple[type[Exception], ...]]
"""A decompressor of the member that starts with some bytes (``decompress``, ``eof``, ``unused_data``), and its errors."""


def compression_of(head: bytes) -> str | None:
    """The compression of a file that starts with ``head``: "gz", "bz2", "xz" or "zst"; else None."""
    return next((name for name, start in _STARTS.items() if start.match(head)), None)


def decompressed(stream: BinaryIO, compression: str, *, name: str) -> BinaryIO:
    """The content of ``stream``. Memory is bounded: 100 MiB and the window of the compression.

    Args:
        name: the file's name, for messages.

    Raises:
        UserError: zstandard is not installed; when reading: the file is damaged or truncated, or a window is too large.
    """
    return stream_of(_members(stream, *_codec(compression, name), name))


def _codec(compression: str, name: str) -> _Codec:
    if compression == "zst":
        return _zst(name)
    if compression == "gz":
        return (lambda start: zlib.decompressobj(wbits=31)), (zlib.error,)
    if compression == "bz2":
        bz2 = _of_python("bz2", name)
        return (lambda start: bz2.BZ2Decompressor()), (OSError, ValueError)
    lzma = _of_python("lzma", name)
    return (lambda start: lzma.LZMADecompressor(lzma.FORMAT_XZ)), (lzma.LZMAError,)


def _of_python(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{name} cannot be read, this Python was built without {module}: decompress the file.") from error


def _zst(name: str) -> _Codec:
    zstandard = need("zstandard", what="A zst file")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_ZST_WINDOW)

    def new(start: bytes) -> Any:
        try:
            window = zstandard.get_frame_parameters(start).window_size
        except zstandard.ZstdError:
            window = 0  # reading says what is wrong
        if window > _LARGEST_ZST_WINDOW:
            raise UserError(
                f"{name} needs {window / 2**20:.0f} MiB of memory to decompress, more than "
                f"{_LARGEST_ZST_WINDOW / 2**20:.0f} MiB: compress it again without --long and --ultra."
            )
        return decompressor.decompressobj()

    return new, (zstandard.ZstdError,)


def _members(stream: BinaryIO, new: Callable[[bytes], Any], errors: tuple[type[Exception], ...], name: str) -> Iterator[bytes]:
    """The decompressed members of a stream, one after the other."""
    member: Any = None  # the decompressor of a member that has begun
    while read := stream.read(_READ_BYTES):
        rest = memoryview(read)
        while rest:
            if member is None:
                head = bytes(rest).lstrip(b"\0")  # programs pad members to the size of a block
                if not head:
                    break
                if len(head) < _MEMBER_HEAD:
                    head += stream.read(_READ_BYTES)
                member, rest = new(head[:_MEMBER_HEAD]), memoryview(head)
            part = rest[:_SLICE_BYTES]
            try:
                output = member.decompress(part)
            except errors as error:
                raise UserError(f"{name} is damaged: it cannot be decompressed. Copy or download it again.") from error
            rest = rest[len(part) - len(member.unused_data) :]
            if member.eof:
                member = None
            yield output
    if member is not None:
        raise UserError(f"{name} is truncated: its compressed data end too early. Copy or download it again.")

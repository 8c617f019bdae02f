"""Decompress gz, bz2, xz and zst as a stream. A file may have several members, as `cat a.gz b.gz` makes."""

from __future__ import annotations

import importlib
import io
import re
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, cast

from lit_llm.core.errors import UserError, need

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


class _Codec(NamedTuple):
    new: Callable[[bytes], Any]
    """A decompressor of the member that starts with these bytes: ``decompress``, ``eof``, ``unused_data``."""
    errors: tuple[type[Exception], ...]


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
    codec = _CODECS[compression](name)
    return cast(BinaryIO, io.BufferedReader(_Members(stream, codec, name), 2**18))


def _gz(name: str) -> _Codec:
    return _Codec(lambda start: zlib.decompressobj(wbits=31), (zlib.error,))


def _bz2(name: str) -> _Codec:
    bz2 = _of_python("bz2", name)
    return _Codec(lambda start: bz2.BZ2Decompressor(), (OSError, ValueError))


def _xz(name: str) -> _Codec:
    lzma = _of_python("lzma", name)
    return _Codec(lambda start: lzma.LZMADecompressor(lzma.FORMAT_XZ), (lzma.LZMAError,))


def _of_python(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{name} cannot be read, this Python was built without {module}: decompress the file.") from error


def _zst(name: str) -> _Codec:
    zstandard = need("zstandard", extra="data", what="A zst file")
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

    return _Codec(new, (zstandard.ZstdError,))


_CODECS = {"gz": _gz, "bz2": _bz2, "xz": _xz, "zst": _zst}


class _Members(io.RawIOBase):
    """The decompressed members of a stream, one after the other."""

    def __init__(self, stream: BinaryIO, codec: _Codec, name: str) -> None:
        self._stream, self._codec, self._name = stream, codec, name
        self._member: Any = None  # the decompressor of a member that has begun
        self._input = memoryview(b"")
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        filled = 0
        while filled < len(view):
            if not self._output:
                output = self._decompress_slice()
                if output is None:
                    break
                self._output = memoryview(output)
            part = self._output[: len(view) - filled]
            view[filled : filled + len(part)] = part
            self._output = self._output[len(part) :]
            filled += len(part)
        return filled

    def _decompress_slice(self) -> bytes | None:
        """The next output, which may be empty; None at the end of the stream."""
        if not self._input:
            read = self._stream.read(_READ_BYTES)
            if not read and self._member is not None:
                raise UserError(f"{self._name} is truncated: its compressed data end too early. Copy or download it again.")
            if not read:
                return None
            self._input = memoryview(read)
        if self._member is None:
            self._input = memoryview(bytes(self._input).lstrip(b"\0"))  # programs pad members to the size of a block
            if not self._input:
                return b""
            if len(self._input) < _MEMBER_HEAD:
                self._input = memoryview(bytes(self._input) + self._stream.read(_READ_BYTES))
            self._member = self._codec.new(bytes(self._input[:_MEMBER_HEAD]))
        part = self._input[:_SLICE_BYTES]
        try:
            output: bytes = self._member.decompress(part)
        except self._codec.errors as error:
            raise UserError(f"{self._name} is damaged: it cannot be decompressed. Copy or download it again.") from error
        used = len(part)
        if self._member.eof:
            used -= len(self._member.unused_data)
            self._member = None
        self._input = self._input[used:]
        return output

"""Read plain text, where a file or a range of its bytes is one document; and cut documents of all formats into pieces."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers import interface
from lit_llm.ingest.readers.interface import Piece

# A newline between two words. No pre-tokenizer in use joins text across it, so cutting there changes no token.
_SAFE_CUT = re.compile(rb"\S\n(?=\S)")
# Indented text has no newline between two words. Nearly all pre-tokenizers also start a word at a space between two letters.
_WORD_CUT = re.compile(rb".*[A-Za-z](?= [A-Za-z])", re.DOTALL)


def read_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of ``stream`` in chunks of at most ``PIECE_BYTES``."""
    while chunk := stream.read(interface.PIECE_BYTES):
        yield chunk


class _Chunks(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (chunk := next(self._chunks, None)) is not None:
            self._rest = memoryview(chunk)
        part = self._rest[: len(buffer)]
        buffer[: len(part)] = part
        self._rest = self._rest[len(part) :]
        return len(part)


def stream_of(chunks: Iterator[bytes]) -> BinaryIO:
    """A binary file that has the bytes of ``chunks``. A chunk is taken from the iterator when its bytes are read."""
    return cast(BinaryIO, io.BufferedReader(_Chunks(chunks), 2**18))


def without_mark(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield ``chunks``, the content of a file, without a UTF-8 byte order mark at the start."""
    yield next(chunks, b"").removeprefix(codecs.BOM_UTF8)
    yield from chunks


def read_bytes(file: BinaryIO, count: int, *, name: str) -> Iterator[bytes]:
    """Yield the next ``count`` bytes of a file.

    Raises:
        UserError: The file has fewer bytes.
    """
    unread = count
    while unread:
        chunk = file.read(min(unread, interface.PIECE_BYTES))
        if not chunk:
            raise UserError(f"{name} became shorter while it was being read: prepare the data again.")
        unread -= len(chunk)
        yield chunk


def pieces_of(text: bytes) -> Iterable[Piece]:
    """The pieces of a document whose text is in memory, cut as `cut_pieces` cuts."""
    if len(text) > interface.PIECE_BYTES:
        return cut_pieces([text])
    return (Piece(text, last=True),) if text else ()


def cut_pieces(chunks: Iterable[bytes]) -> Iterator[Piece]:
    """Yield one document, given in chunks of any size, in pieces of about ``PIECE_BYTES``.

    Pieces are cut between lines if possible, else between words, else at a line end or a character. The cuts depend on the
    text alone, not on how it is split into ``chunks``. An empty document has no piece.
    """
    rest = b""
    previous = None
    for block in _blocks(chunks):
        if previous is not None:
            rest += previous
            cut = _cut(rest)
            yield Piece(rest[:cut], last=False)
            rest = rest[cut:]
        previous = block
    if previous is not None:
        yield Piece(rest + previous, last=True)


def _blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of ``chunks`` in blocks of ``PIECE_BYTES``; the last block may be shorter."""
    size = interface.PIECE_BYTES
    parts: list[bytes] = []
    gathered = 0
    for chunk in chunks:
        parts.append(chunk)
        gathered += len(chunk)
        if gathered >= size:
            joined = b"".join(parts)
            full = gathered - gathered % size
            for start in range(0, full, size):
                yield joined[start : start + size]
            parts, gathered = [joined[full:]], gathered - full
    if gathered:
        yield b"".join(parts)


def _cut(text: bytes) -> int:
    """The byte position at which to cut ``text``, after which the document goes on: the last position in ``text`` that no token
    can span; without one, a line end or a character's start near the end."""
    window = max(0, len(text) - 2**16)  # far enough back to contain a line end
    safe = None
    for match in _SAFE_CUT.finditer(text, window):
        safe = match.end()
    if safe:
        return safe
    if word := _WORD_CUT.match(text, window):
        return word.end()
    newline = text.rfind(b"\n", 0, len(text)) + 1
    if newline:
        return newline
    # Text without lines: cut before the last character, which may be incomplete. UTF-8 has at most three continuation bytes.
    for back in range(1, 5):
        if len(text) > back and text[-back] & 0xC0 != 0x80:
            return len(text) - back
    return len(text)

"""Whole documents of a reader, each with its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lit_llm.ingest.readers import DocumentReader


class Document(NamedTuple):
    text: str
    """Bytes that are not UTF-8 are U+FFFD."""
    source: str
    """The file, a colon, and the number of the record in it, from 1. Records without text are counted."""
    is_utf8: bool = True
    """Whether all bytes of the text were UTF-8 when it was read."""


def documents_of(reader: DocumentReader, *, name: str) -> Iterator[Document]:
    """The documents of a source. Each is held in memory as a whole, because rules judge whole documents.

    Args:
        name: of the source.
    """
    name = name.encode(errors="replace").decode()  # a file's name may not be UTF-8
    found = 0
    pieces: list[bytes] = []
    for piece in reader:
        pieces.append(piece.text)
        if piece.last:
            found += 1
            yield _document(b"".join(pieces), f"{name}:{found + reader.skipped}")
            pieces = []


def _document(text: bytes, source: str) -> Document:
    try:
        return Document(text.decode(), source)
    except UnicodeDecodeError:
        return Document(text.decode(errors="replace"), source, is_utf8=False)

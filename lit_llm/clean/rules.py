"""What a rule is: a function of one text; and the whole documents that the rules judge, as a reader gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Removed(NamedTuple):
    """Why a document is removed."""

    rule: str
    """A step and a reason: "gopher/too_few_words". The report counts by it."""
    detail: str
    """What was found in this document, for the samples: "31 words"."""
    secret: bool = False
    """Whether the samples must not show the text."""


Rule = Callable[[str], str | Removed]
"""The text, perhaps changed, or why the document is removed. It depends on the text alone, so any worker gives the same."""


class Step(NamedTuple):
    """A rule and the name under which the report counts its time and its changes."""

    name: str
    rule: Rule

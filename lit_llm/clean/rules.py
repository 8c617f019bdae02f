"""The types of rules, which are functions of one text, and of the whole documents that rules judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from lit_llm.ingest.readers import DocumentReader
from lit_llm.ingest.readers.text_value import is_utf8


class Document(NamedTuple):
    text: str
    """The whole text. Bytes that are not UTF-8 have become U+FFFD."""
    source: str
    """The file, a colon, and the number of the record in it, from 1. Records without text are counted."""
    is_utf8: bool = True
    """Whether all bytes of the text were UTF-8 when it was read."""


def documents_of(reader: DocumentReader, *, name: str) -> Iterator[Document]:
    """Yield the documents of the source ``name``. Each is in memory as a whole, because rules judge whole documents."""
    name = name.encode(errors="replace").decode()  # a file's name may not be UTF-8
    count = 0
    pieces: list[bytes] = []
    for piece in reader:
        pieces.append(piece.text)
        if piece.last:
            count += 1
            text = b"".join(pieces)
            yield Document(text.decode(errors="replace"), f"{name}:{count + reader.skipped}", is_utf8(text))
            pieces = []


class Removed(NamedTuple):
    """Why a document is removed."""

    rule: str
    """The step and its reason, such as "gopher_quality/short_doc". The report has a count for each."""
    detail: str
    """A detail of this document, for the samples, such as "at character 31"."""
    secret: bool = False
    """Whether the samples must not show the text."""


Rule = Callable[[str], str | Removed]
"""Takes a text. Returns the text, perhaps changed, or why the document is removed. Nothing but the text decides the result."""


class Step(NamedTuple):
    """A rule and the name under which the report counts its time and its changes."""

    name: str
    rule: Rule

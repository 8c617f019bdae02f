"""The types of the documents, of the rules that judge them (functions of one text), and of a rule's result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from lit_llm.ingest.readers import DocumentReader
from lit_llm.ingest.readers.text_value import is_utf8


class Document(NamedTuple):
    text: str
    """The whole text. Bytes that are not UTF-8 have become U+FFFD."""
    source: str
    """The name of the file, a colon, and the number of the record in the file, from 1. Records without text count, too."""
    is_utf8: bool = True
    """Whether all bytes of the text were valid UTF-8 in the file."""


def documents_of(reader: DocumentReader, *, name: str) -> Iterator[Document]:
    """Yield the documents of ``reader``, whose source is called ``name``. Each document is joined, as rules judge it whole."""
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
    """The result of a rule that removes a document: the reason."""

    rule: str
    """The step and the reason of the removal, such as "gopher_quality/short_doc". The report counts each separately."""
    detail: str
    """What the samples say about this document beside the rule, such as "at character 31"; may be empty."""
    secret: bool = False
    """Whether the samples must not show the document's text, because it contains a secret."""


Rule = Callable[[str], str | Removed]
"""Takes a document's text. Returns the text, perhaps changed, or why to remove the document. Only the text decides this."""


class Step(NamedTuple):
    """A rule and the name under which the report counts its time and its changes."""

    name: str
    rule: Rule

"""The types of a document, of a rule (a function that changes or removes one text), and of a rule's result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from lit_llm.ingest.readers import DocumentReader
from lit_llm.ingest.readers.text_value import is_utf8


class Document(NamedTuple):
    text: str
    """The whole text of the document. Bytes that are not UTF-8 have become U+FFFD."""
    source: str
    """The name of the document's file, a colon, and the number of its record in the file, from 1, counting empty records."""
    is_utf8: bool = True
    """Whether all bytes of the text were valid UTF-8 in the file."""


def documents_of(reader: DocumentReader, *, name: str) -> Iterator[Document]:
    """Yield the documents of ``reader``, each joined from its pieces, as rules need whole texts. ``name``: the file's name."""
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
    """Record that a rule returns instead of a text if the document is to be removed: the reason of the removal."""

    rule: str
    """The step and the reason, such as "gopher_quality/short_doc", under which the report counts the removal."""
    detail: str
    """A detail of this removal for the samples of removed documents, such as "at character 31"; may be empty."""
    secret: bool = False
    """Whether the samples must not show the document's text, because it contains a secret."""


Rule = Callable[[str], str | Removed]
"""A function that takes a document's text, and returns the text, perhaps changed, or the reason to remove the document."""


class Step(NamedTuple):
    """Record of a rule, and of the name under which the report counts the rule's time and changes."""

    name: str
    rule: Rule

"""The types that the readers of formats take and return. A reader yields text in pieces, so that memory is bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lit_llm.core.errors import UserError

PIECE_BYTES = 2**18
"""The approximate size of a piece in bytes. If possible, documents are cut where no token can contain text of both sides."""


class Piece(NamedTuple):
    """Record of a part of a document, or a whole document. Readers yield the pieces of a document in order."""

    text: bytes
    """The text of the piece in UTF-8. Invalid bytes of a plain text file are passed on unchanged."""
    last: bool
    """Whether the document ends with this piece."""


@dataclass
class SourceFile:
    """Record of a file that is being read: the settings for the reader, and the counts that the reader updates."""

    name: str
    """The file's name, for messages."""
    key: str
    """The key or column of the text or of the messages. Dots lead into objects and structs: ``meta.body``."""
    messages: bool = False
    """Whether documents are conversations."""
    skipped: int = 0
    """Number of documents so far whose text is null or empty."""
    fraction: float | None = None
    """The share of the file that has been read, from 0 to 1. None: the position in the file says how much has been read."""


FORMATS = ("text", "jsonl", "parquet", "arrow", "tar")


@dataclass(frozen=True)
class ReadSettings:
    """The settings with which files are read: format, and the key of the text or of the messages.

    Raises:
        UserError: A value is not allowed.
    """

    format: str = "auto"
    """``auto`` detects each file's format. Other values refuse files of other formats, but ``text`` reads any file as it is."""
    text_key: str = "text"
    """The key or column that holds the text. Dots lead into objects: ``meta.body``. A key "meta.body" itself comes first."""
    messages: bool = False
    """Whether documents are conversations. If so, the key has a list of messages, and a document is the JSON of this list."""

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            raise UserError(f"format is {self.format!r}, but must be auto, {', '.join(FORMATS[:-1])} or tar (--data.format).")
        if not self.text_key:
            what = "messages" if self.messages else "text"
            raise UserError(f"{what}_key is empty: give the key or column that holds the {what} (--data.{what}_key).")

    def identity(self) -> list[str]:
        """Values for a cache key. The values of two settings differ if a file can have other documents."""
        return [self.format, self.text_key, *(["messages"] if self.messages else [])]

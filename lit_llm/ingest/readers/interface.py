"""The types that a reader receives and returns. A reader returns text in pieces, so that long text takes bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lit_llm.core.errors import UserError

PIECE_BYTES = 2**18
"""About the size of a piece. Documents are cut at places where no tokenizer makes a token of both sides, if there are any."""


class Piece(NamedTuple):
    """A part of a document, or all of it. The pieces of a document follow each other."""

    text: bytes
    """The text of the piece in UTF-8. A plain text file may hold invalid bytes, which are passed on as they are."""
    last: bool
    """Whether the document ends with this piece."""


@dataclass
class SourceFile:
    """A file while it is read: the settings that a reader receives, and the counts that it reports beside the documents."""

    name: str
    """The file's name, for messages."""
    key: str
    """The key or column of the text or of the messages. Dots lead into objects and structs: ``meta.body``."""
    messages: bool = False
    """Whether documents are conversations."""
    skipped: int = 0
    """Number of documents so far whose text is null or empty."""
    fraction: float | None = None
    """Share of the file that has been read. None: it follows from the position in the file."""


FORMATS = ("text", "jsonl", "parquet", "arrow", "tar")


@dataclass(frozen=True)
class ReadSettings:
    """How to read files.

    Raises:
        UserError: A value is not allowed.
    """

    format: str = "auto"
    """``auto`` detects each file's format. Other values refuse files of other formats, but ``text`` reads any file as it is."""
    text_key: str = "text"
    """The key or column that holds the text. Dots lead into objects: ``meta.body``. A key "meta.body" itself comes first."""
    messages: bool = False
    """Whether documents are conversations: the key then holds a list of messages, and a document is the JSON of the list."""

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            raise UserError(f"format is {self.format!r}, but must be auto, {', '.join(FORMATS[:-1])} or tar (--data.format).")
        if not self.text_key:
            what = "messages" if self.messages else "text"
            raise UserError(f"{what}_key is empty: give the key or column that holds the {what} (--data.{what}_key).")

    def identity(self) -> list[str]:
        """Values for a cache key: they differ if a file can be read in another way."""
        return [self.format, self.text_key, *(["messages"] if self.messages else [])]

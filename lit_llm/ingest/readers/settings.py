"""What a user can say about the files to read."""

from __future__ import annotations

from dataclasses import dataclass

from lit_llm.errors import UserError

FORMATS = ("text", "jsonl", "parquet", "arrow", "tar")


@dataclass(frozen=True)
class ReadSettings:
    """How to read files.

    Raises:
        UserError: A value is not allowed.
    """

    format: str = "auto"
    """``auto`` decides by the content of each file. A format refuses files of another. ``text`` reads any file as it is."""
    text_key: str = "text"
    """The key or column that holds the text. Dots lead into objects: ``meta.body``. A key that contains the dots wins."""

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            raise UserError(f"format is {self.format!r}, but must be auto, {', '.join(FORMATS[:-1])} or tar (--data.format).")
        if not self.text_key:
            raise UserError("text_key is empty: give the key or column that holds the text (--data.text_key).")

"""JSONL: one object a line. A line of normal length is parsed whole, a longer one as a stream."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from lit_llm.ingest.readers.interface import Counts, Piece
from lit_llm.ingest.readers.json_stream import CHUNK_BYTES
from lit_llm.ingest.readers.json_text import stream_text, text_of
from lit_llm.ingest.readers.plain_text import pieces_of

LONG_LINE_BYTES = 2**21
"""A longer line is not held in memory."""


def read_jsonl(stream: BinaryIO, key: str, counts: Counts, *, name: str, hint: str) -> Iterator[Piece]:
    """The documents of a JSONL file. Blank lines are ignored.

    Args:
        key: the key of the text, with dots into objects.
        name: the file's name, for messages.
        hint: how to read a file as plain text that only looks like JSONL; may be empty.

    Raises:
        UserError: A line is not a JSON object, has no such key, or another value than a string.
    """
    number = 0
    while line := stream.readline(LONG_LINE_BYTES):
        number += 1
        where = f"{name} line {number}"
        long = len(line) == LONG_LINE_BYTES and not line.endswith(b"\n")
        line = line.removeprefix(codecs.BOM_UTF8)  # not of the first line only: files are joined with cat
        if long:
            counts.skipped += not (yield from stream_text(_rest_of_line(line, stream), key, where=where, hint=hint))
        elif not line.isspace():
            text = text_of(line, key, where=where, hint=hint)
            counts.skipped += not text
            yield from pieces_of(text)


def _rest_of_line(start: bytes, stream: BinaryIO) -> Iterator[bytes]:
    for at in range(0, len(start), CHUNK_BYTES):
        yield start[at : at + CHUNK_BYTES]
    while part := stream.readline(CHUNK_BYTES):
        yield part
        if part.endswith(b"\n"):
            return

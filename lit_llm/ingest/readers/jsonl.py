"""JSONL: one object a line. A line of normal length is parsed whole, a longer one as a stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers.interface import Piece, SourceFile
from lit_llm.ingest.readers.json_stream import CHUNK_BYTES, JsonStream, parse
from lit_llm.ingest.readers.messages import pieces_of_messages
from lit_llm.ingest.readers.plain_text import cut_pieces, pieces_of
from lit_llm.ingest.readers.text_value import missing_key, text_in, type_name, utf8

LONG_LINE_BYTES = 2**21
"""A longer line is not held in memory."""


def stream_text(chunks: Iterator[bytes], key: str, *, where: str, hint: str = "") -> Generator[Piece, None, bool]:
    """The text of an object of any length, in bounded memory. It refuses a key that is given twice.

    Returns:
        Whether there is text.
    """
    stream = JsonStream(chunks, where)
    found = False
    try:
        for piece in cut_pieces(map(utf8, stream.text(key))):
            found = True
            yield piece
    except UserError:
        raise
    except ValueError as error:
        raise _unreadable(error, where, hint) from error
    if not stream.found:
        raise missing_key(where, key, stream.keys, hint=hint)
    return found


def _unreadable(error: Exception, where: str, hint: str) -> UserError:
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"{where} is not UTF-8: convert the file with iconv -f ITS_ENCODING -t UTF-8{hint}.")
    lines = ", put each object on one line (jq -c . FILE > FILE.jsonl)" if hint else ""
    return UserError(f"{where} is not a valid JSON object: remove or repair it{lines}{hint}.")


def read_jsonl(stream: BinaryIO, of: SourceFile, *, hint: str) -> Iterator[Piece]:
    """The documents of a JSONL file: texts or conversations. Blank lines are ignored. A conversation is held in memory.

    Args:
        hint: how to read a file as plain text that only looks like JSONL; may be empty.

    Raises:
        UserError: A line is not a JSON object, has no such key, or another value than a string or a conversation.
    """
    number, most = 0, -1 if of.messages else LONG_LINE_BYTES
    while line := stream.readline(most):
        number += 1
        where = f"{of.name} line {number}"
        long = len(line) == most and not line.endswith(b"\n")
        line = line.removeprefix(codecs.BOM_UTF8)  # not of the first line only: files are joined with cat
        if long:
            of.skipped += not (yield from stream_text(_rest_of_line(line, stream), of.key, where=where, hint=hint))
        elif line.strip():
            yield from document_of(_object(line, of, where, hint), of, where=where, hint=hint)


def document_of(record: dict[str, Any], of: SourceFile, *, where: str, hint: str = "") -> Iterator[Piece]:
    """The text or the conversation of a record. Arguments and errors as of `text_in`."""
    if of.messages:
        yield from pieces_of_messages(record, of.key, of, where=where)
        return
    text = text_in(record, of.key, where=where, hint=hint)
    of.skipped += not text
    yield from pieces_of(text)


def _object(line: bytes, of: SourceFile, where: str, hint: str) -> dict[str, Any]:
    try:
        record = json.loads(line) if of.messages else parse(line.decode())
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, where, hint) from error
    if not isinstance(record, dict):
        raise UserError(f"{where} is {type_name(record)}, but must be an object with the key {of.key!r}{hint}.")
    return record


def _rest_of_line(start: bytes, stream: BinaryIO) -> Iterator[bytes]:
    for at in range(0, len(start), CHUNK_BYTES):
        yield start[at : at + CHUNK_BYTES]
    while part := stream.readline(CHUNK_BYTES):
        yield part
        if part.endswith(b"\n"):
            return

"""Read documents from JSONL, in which each line is a JSON object. Memory holds one line."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers.interface import Piece, SourceFile
from lit_llm.ingest.readers.messages import pieces_of_messages
from lit_llm.ingest.readers.plain_text import pieces_of
from lit_llm.ingest.readers.text_value import text_in, type_name


def read_jsonl(stream: BinaryIO, of: SourceFile, *, hint: str) -> Iterator[Piece]:
    """Yield, in pieces, the documents of a JSONL file: texts or conversations. Blank lines are ignored.

    Args:
        hint: the end of error messages: how to read the file as plain text if it only looks like JSONL. May be empty.

    Raises:
        UserError: A line is not a JSON object, lacks the key, or has neither a string nor a conversation under the key.
    """
    for number in itertools.count(1):
        if not (line := stream.readline()):
            return
        where = f"{of.name} line {number}"
        line = line.removeprefix(codecs.BOM_UTF8)  # on any line: files are joined with cat
        if line.strip():
            yield from document_of(parse_object(line, of, where, hint), of, where=where, hint=hint)


def document_of(record: dict[str, Any], of: SourceFile, *, where: str, hint: str = "") -> Iterator[Piece]:
    """Yield the text, or the conversation, of a JSON record in pieces. Counts a record without text in ``of.skipped``.

    Args:
        where: the name of the record in errors: "FILE line 3".
        hint: the end of error messages: how to read the file as plain text. May be empty.

    Raises:
        UserError: The record lacks the key, or has neither a string nor a conversation under the key.
    """
    if of.messages:
        yield from pieces_of_messages(record, of.key, of, where=where)
        return
    text = text_in(record, of.key, where=where, hint=hint)
    of.skipped += not text
    yield from pieces_of(text)


def parse_object(content: bytes, of: SourceFile, where: str, hint: str = "") -> dict[str, Any]:
    """Parse ``content``, the JSON of an object, and return the object. ``where``, ``hint``: start and end of error messages.

    Raises:
        UserError: ``content`` is not UTF-8, or not the JSON of an object.
    """
    try:
        record = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8: convert the file with iconv -f ITS_ENCODING -t UTF-8{hint}.") from error
    except (ValueError, RecursionError) as error:
        lines = ", put each object on one line (jq -c . FILE > FILE.jsonl)" if hint else ""
        raise UserError(f"{where} is not a valid JSON object: remove or repair it{lines}{hint}.") from error
    if not isinstance(record, dict):
        raise UserError(f"{where} is {type_name(record)}, but must be an object with the key {of.key!r}{hint}.")
    return record

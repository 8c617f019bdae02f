"""The text of one JSON object."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers.interface import Piece
from lit_llm.ingest.readers.json_stream import JsonStream, parse
from lit_llm.ingest.readers.plain_text import cut_pieces
from lit_llm.ingest.readers.text_value import MISSING, find, keys_of, missing_key, no_text, type_name, utf8


def text_of(line: bytes, key: str, *, where: str, hint: str = "") -> bytes:
    """The text under ``key`` of an object; empty if it is null.

    Args:
        where: names the object in messages: "FILE line 3".
        hint: how to read a file as plain text that only looks like JSON; may be empty.

    Raises:
        UserError: It is not a JSON object, has no such key, or another value than a string.
    """
    try:
        record = parse(line.decode())
    except ValueError as error:
        raise _unreadable(error, where, hint) from error
    if not isinstance(record, dict):
        raise UserError(f"{where} is {type_name(record)}, but must be an object with the key {key!r}{hint}.")
    value = find(record, key)
    if isinstance(value, str):
        return utf8(value)
    if value is MISSING:
        raise missing_key(where, key, keys_of(record, key), hint=hint)
    if value is not None:
        raise no_text(where, key, type_name(value))
    return b""


def stream_text(chunks: Iterator[bytes], key: str, *, where: str, hint: str = "") -> Generator[Piece, None, bool]:
    """The same for an object of any length, in bounded memory. It refuses a key that is given twice.

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


def _unreadable(error: ValueError, where: str, hint: str) -> UserError:
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"{where} is not UTF-8: convert the file with iconv -f ITS_ENCODING -t UTF-8{hint}.")
    lines = ", put each object on one line (jq -c . FILE > FILE.jsonl)" if hint else ""
    return UserError(f"{where} is not a valid JSON object: remove or repair it{lines}{hint}.")

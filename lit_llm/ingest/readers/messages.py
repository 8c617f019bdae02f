"""Conversations in JSONL and tables: a document is the JSON of its messages. Each conversation is held in memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from lit_llm.errors import UserError
from lit_llm.ingest.pieces import Piece
from lit_llm.ingest.readers.columns import TextColumn
from lit_llm.ingest.readers.counts import Counts
from lit_llm.ingest.readers.text_value import MISSING, find, keys_of, missing_key, utf8

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
"""Roles that published templates know."""
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
_KEY = "messages"


def read_messages(stream: BinaryIO, key: str, counts: Counts, *, name: str) -> Iterator[Piece]:
    """The conversations of a JSONL file. Blank lines are ignored.

    Raises:
        UserError: A line is not a JSON object, or has no conversation under ``key``.
    """
    for number, line in enumerate(stream, start=1):
        where = f"{name} line {number}"
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not a valid JSON object: remove or repair it.") from error
        yield from _pieces(record, key, counts, where)


def messages_of_row(row: dict[str, Any], key: str, counts: Counts, *, where: str) -> Iterator[Piece]:
    """The conversation of a row of a table, which has null where a message lacks a key."""
    yield from _pieces(_without_null(row), key, counts, where)


class MessagesColumn(TextColumn):
    """The column of a table that holds conversations."""

    what = _KEY
    wanted = "conversations must be lists of messages"

    def texts(self, batch: Any) -> Iterator[Piece]:
        batch.validate()
        for value in self.values(batch).to_pylist():
            self._rows += 1
            key = ".".join(self.path)
            yield from messages_of_row({key: value}, key, self._counts, where=f"{self._name} row {self._rows}")

    def is_wanted(self, kind: Any) -> bool:
        types = self._types
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        return (is_list and types.is_struct(kind.value_type)) or types.is_null(kind)


def _pieces(record: Any, key: str, counts: Counts, where: str) -> Iterator[Piece]:
    if not isinstance(record, dict):
        raise UserError(f"{where} is {_kind(record)}, but must be an object with the key {key!r}.")
    value = find(record, key)
    if value is MISSING:
        raise missing_key(where, key, keys_of(record, key), what=_KEY)
    if value is None or value == []:
        counts.skipped += 1
        return
    if not isinstance(value, list):
        raise UserError(f"{where} has {_kind(value)} under {key!r}, but must have a list of messages (--data.messages_key).")
    messages = [_message(one, f"{where}: message {number}") for number, one in enumerate(value, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where} has no message of the role assistant, so nothing of it would be learned: remove it.")
    yield Piece(utf8(json.dumps(messages, ensure_ascii=False)), last=True)


def _message(value: Any, where: str) -> dict[str, Any]:
    """A message with the keys "role" and "content", and perhaps others. ShareGPT's are renamed."""
    if not isinstance(value, dict):
        raise UserError(f"{where} is {_kind(value)}, but must be an object with role and content.")
    message = {key: one for key, one in value.items() if one is not None}  # templates expect a key that is absent
    if "role" not in message and isinstance(message.get("from"), str):
        role = message.pop("from")
        message = {"role": _SHAREGPT.get(role, role), "content": message.pop("value", None)} | message
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"{where} has the role {role!r}, but must have one of {', '.join(ROLES)}.")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise UserError(f"{where} has no content: remove the conversation, or give the message a text.")
    if content is not None and not isinstance(content, str | list):
        raise UserError(f"{where} has {_kind(content)} as content, but must have a text.")
    return message


def _without_null(value: Any, *, within: bool = False) -> Any:
    """The same row, without the nulls ``within`` a list of messages."""
    if isinstance(value, dict):
        return {key: _without_null(one, within=within) for key, one in value.items() if not within or one is not None}
    return [_without_null(one, within=True) for one in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")

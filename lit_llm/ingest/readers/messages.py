"""Read conversations from JSONL and tables. The document of a conversation is the JSON of the list of its messages. If a record
has keys of ``BESIDE``, its document is the JSON of an object with "messages" and these keys.

A record of JSONL with "chosen" and "rejected" is a preference pair. Its document is the JSON of an object with "messages" (the
prompt), "chosen" and "rejected", each a list of messages.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers.columns import TextColumn
from lit_llm.ingest.readers.interface import Piece, SourceFile
from lit_llm.ingest.readers.text_value import MISSING, find, keys_of, missing_key, type_name, utf8

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
"""The roles that a message may have: the roles that published chat templates know."""
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
_KEY = "messages"

BESIDE = {"tools": list, "documents": list, "chat_template_kwargs": dict}
"""Key of a record beside its messages → the type of its value. The chat template gets these values."""
_LOST = ("system", "functions")
"""Keys that other formats have beside the messages. A record with such a key is refused, because no template gets its value."""
_PAIR = {"chosen", "rejected"}
_QUESTIONS, _ANSWERS = ("prompt", "instruction", "question", "query"), ("response", "output", "completion", "answer")
"""Keys of the texts in data whose records are one question and one answer."""
_TEXT_PARTS = ("text", "input_text", "output_text")


class MessagesColumn(TextColumn):
    """Reads the conversations in one column of a Parquet or Arrow file, and the columns named in ``BESIDE``, such as tools."""

    what = _KEY
    wanted = "conversations must be lists of messages"

    def __init__(self, schema: Any, of: SourceFile) -> None:
        super().__init__(schema, of)
        *above, own = self.path
        beside = [self._find(schema, ".".join([*above, name])) for name in BESIDE if name != own]
        self.paths += [column[0] for column in beside if column]

    def texts(self, batch: Any) -> Iterator[Piece]:
        batch.validate()
        for values in zip(*(self.values(batch, path).to_pylist() for path in self.paths), strict=True):
            self._rows += 1
            row = {path[-1]: value for path, value in zip(self.paths, values, strict=True)}
            where = f"{self._of.name} row {self._rows}"
            yield from pieces_of_messages(without_null(row), self.path[-1], self._of, where=where)

    def is_wanted(self, kind: Any) -> bool:
        types = self._types
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        return (is_list and types.is_struct(kind.value_type)) or types.is_null(kind)


def pieces_of_messages(record: dict[str, Any], key: str, of: SourceFile, *, where: str) -> Iterator[Piece]:
    """Yield the conversation, or preference pair, of a record as one piece, JSON; nothing if the key has null or an empty list.

    ``key``: the key of the messages. ``where``: the name of the record in errors.

    Raises:
        UserError: The record has no valid conversation under the key.
    """
    value = find(record, key)
    if value is MISSING and not _PAIR.isdisjoint(record):
        pair = _pair(record, where) | _beside(record, "chosen", where)
        yield Piece(utf8(json.dumps(pair, ensure_ascii=False)), last=True)
        return
    if value is MISSING:
        raise missing_key(where, key, keys_of(record, key), what=_KEY, mend=_conversion(record))
    if value is None or value == []:
        of.skipped += 1
        return
    if not isinstance(value, list):
        raise UserError(
            f"{where} has {type_name(value)} under {key!r}, but must have a list of messages (--data.messages_key)."
        )
    messages = [_message(one, f"{where}: message {number}") for number, one in enumerate(value, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where} has no message of the role assistant, so nothing of it would be learned: remove it.")
    beside = _beside(record, key, where)
    yield Piece(utf8(json.dumps({_KEY: messages} | beside if beside else messages, ensure_ascii=False)), last=True)


def _conversion(record: dict[str, Any]) -> str:
    """A clause for an error: how to convert the record's question and answer to messages; "" if the record lacks such texts."""
    texts = [name for name, value in record.items() if isinstance(value, str)]
    question, answer = (next((name for name in names if name in texts), None) for names in (_QUESTIONS, _ANSWERS))
    if question is None or answer is None or any(record.get(name) for name in ("system_prompt", "history", *_LOST)):
        return ""  # a conversion would lose these
    asked = f".{question}"
    if question == "instruction" and "input" in texts:  # as in Alpaca, where it may be empty
        asked = '([.instruction, .input] | map(select(. != null and . != "")) | join("\\n\\n"))'
    messages = f'{{role: "user", content: {asked}}}, {{role: "assistant", content: .{answer}}}'
    return f"a row needs messages; convert it: jq -c '{{messages: [{messages}]}}' FILE > chats.jsonl (--data.paths)"


def _pair(record: dict[str, Any], where: str) -> dict[str, Any]:
    """A preference pair as {"messages": the prompt, "chosen": …, "rejected": …}, each a list of messages. If the record's
    "chosen" and "rejected" are whole conversations, the prompt is their common start."""
    values = []
    for name in ("chosen", "rejected"):
        value = record.get(name)
        if not (isinstance(value, str) or (isinstance(value, list) and value)):
            has = type_name(value) if name in record else "nothing"
            raise UserError(f"{where} has {has} under {name!r}, but a pair needs a text or a list of messages there.")
        values.append(_as_messages(value, "assistant", f"{where}: {name}"))
    chosen, rejected = values
    given = record.get("prompt")
    if given is not None and not isinstance(given, str | list):
        raise UserError(f"{where} has {type_name(given)} under 'prompt', but must have a text or a list of messages.")
    prompt = [] if given is None else _as_messages(given, "user", f"{where}: prompt")
    if chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":  # whole conversations
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(map(len, values)))
        while shared and any(each[shared:] and each[shared]["role"] != "assistant" for each in values):
            shared -= 1
        if not shared or not all(one in chosen[:shared] for one in prompt):
            raise UserError(f"{where} has a prompt that chosen and rejected do not share: give both answers to one prompt.")
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise UserError(f"{where} has no 'prompt': give it, or whole conversations under 'chosen' and 'rejected'.")
    if chosen == rejected:
        raise UserError(f"{where} has a pair without a difference: chosen and rejected are the same. Remove it.")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in messages):
            raise UserError(f"{where} has no message of the role assistant in {name!r}, so there is no answer: remove it.")
    return {_KEY: prompt, "chosen": chosen, "rejected": rejected}


def _as_messages(value: str | list[Any], role: str, where: str) -> list[dict[str, Any]]:
    """``value`` as a list of messages. A text becomes one message of the role ``role``."""
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    return [_message(one, f"{where}, message {number}") for number, one in enumerate(messages, start=1)]


def _beside(record: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """Key → value, of the keys ``BESIDE`` (tools, documents, chat_template_kwargs) on the level of ``key`` in the record. Empty
    values are left out, and a value that is JSON text is parsed. Raises a UserError for a value of the wrong type."""
    while key not in record:
        first, _, key = key.partition(".")
        record = record[first]
    if lost := [name for name in _LOST if record.get(name) and name != key]:
        raise UserError(
            f"{where} has {lost[0]!r} beside the messages, which no template gets: make it a message, or remove it."
        )
    values = {name: record[name] for name in BESIDE if record.get(name) and name != key}
    for name, value in values.items():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            values[name] = json.loads(value)
        if not isinstance(values[name], BESIDE[name]):
            wanted = type_name(BESIDE[name]())
            raise UserError(
                f"{where} has {type_name(values[name])} under {name!r}, but must have {wanted}, or the JSON text of one."
            )
    return {name: value for name, value in values.items() if value}


def _message(value: Any, where: str) -> dict[str, Any]:
    """Check a message, and return a copy with "role", "content" and perhaps other keys. Keys of ShareGPT are renamed."""
    if not isinstance(value, dict):
        raise UserError(f"{where} is {type_name(value)}, but must be an object with role and content.")
    message = {key: one for key, one in value.items() if one is not None}  # templates expect no key instead of null
    if "role" not in message and isinstance(message.get("from"), str):
        role = message.pop("from")
        message = {"role": _SHAREGPT.get(role, role), "content": message.pop("value", None)} | message
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"{where} has the role {role!r}, but must have one of {', '.join(ROLES)}.")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise UserError(f"{where} has no content: remove the conversation, or give the message a text.")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": part} for part in content]
        texts = [part.get("text") if part.get("type", "text") in _TEXT_PARTS else None for part in parts]
        if all(isinstance(text, str) for text in texts):
            content = message["content"] = "".join(map(str, texts))
    if content is not None and not isinstance(content, str):
        raise UserError(f"{where} has {type_name(content)} as content, but must have a text, or a list of texts.")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(c, dict) and isinstance(c.get("function", c), dict) for c in calls):
        raise UserError(f"{where} has {type_name(calls)} as tool_calls, but must have a list of objects.")
    return message


def without_null(value: Any, *, within: bool = False) -> Any:
    """A copy of ``value``, a row of a table. Objects inside lists lose the keys whose value is null: a table has a null where a
    message has no such key.

    Args:
        within: whether ``value`` is inside a list, or below a key of ``BESIDE``, where such keys are removed too.
    """
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if not within or one is not None}
        return {key: without_null(one, within=within or key in BESIDE) for key, one in kept.items()}
    return [without_null(one, within=True) for one in value] if isinstance(value, list) else value

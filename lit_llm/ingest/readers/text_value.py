"""Find the value that a key leads to in a record, and say what is wrong if there is no such value or it is not a text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lit_llm.core.errors import UserError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_KEYS = 20  # in a message

MISSING = object()

_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}


def find(value: dict[str, Any], key: str) -> Any:
    """The value under ``key``. If there is no such key, dots in it lead into nested objects: "a.b" is key b of a.

    Returns:
        The value, None if the dots lead into a null, or ``MISSING`` if there is no such key.
    """
    if key in value:
        return value[key]
    first, dot, rest = key.partition(".")
    if not dot or first not in value:
        return MISSING
    inner = value[first]
    if inner is None:
        return None
    return find(inner, rest) if isinstance(inner, dict) else MISSING


def text_in(record: dict[str, Any], key: str, *, where: str, hint: str = "") -> bytes:
    """The text under ``key`` of a record as UTF-8; empty if the value is null.

    Args:
        where: names the record in messages: "FILE line 3".
        hint: for messages: how to read the file as plain text if it only looks like JSON. It may be empty.

    Raises:
        UserError: There is no such key, or its value is not a string.
    """
    value = find(record, key)
    if value is MISSING:
        raise missing_key(where, key, keys_of(record, key), hint=hint)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where} has {type_name(value)} under {key!r}, but the text must be a string (--data.text_key).")
    return utf8(value or "")


def keys_of(value: dict[str, Any], key: str) -> list[str]:
    """The keys that a user could give instead of ``key``, for a message; keys of nested objects are written with dots."""
    first, dot, rest = key.partition(".")
    inner = value.get(first)
    below = [f"{first}.{name}" for name in keys_of(inner, rest)] if dot and isinstance(inner, dict) else []
    return [name for name in value if not below or name != first] + below


def utf8(text: str) -> bytes:
    """``text`` as UTF-8. Half a surrogate pair, which JSON can spell, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text).encode()


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def type_name(value: Any) -> str:
    other = "a number" if isinstance(value, int | float) else f"a value of type {type(value).__name__}"
    return _TYPES.get(type(value), other)


def missing_key(
    where: str, key: str, keys: Iterable[str], *, kind: str = "key", what: str = "text", hint: str = "", mend: str = ""
) -> UserError:
    """The error for a record at ``where`` that has ``keys``, but not ``key``.

    Args:
        kind: what the record has: "key" or "column".
        what: what is sought under the key: "text" or "messages".
        hint: how to read the file as plain text if it only looks like JSON; the end of the message. It may be empty.
        mend: what the user is told to do. Empty: the user is told to name another key.
    """
    names = list(keys)
    shown = ", ".join(names[:_MOST_KEYS]) + (f" and {len(names) - _MOST_KEYS} more" if len(names) > _MOST_KEYS else "")
    has = f"it has {shown}" if names else "it has none"
    mend = mend or f"name the {kind} that holds the {what} (--data.{what}_key)"
    if what == "text" and {"messages", "conversations"} & set(names):
        mend += ", or prepare conversations with --chat_template auto (docs/chat.md)"
    return UserError(f"{where} has no {kind} {key!r}, {has}: {mend}{hint}.")

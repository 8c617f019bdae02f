"""Find the value under a key of a record, and make the error for a missing key or a value that is not text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lit_llm.core.errors import UserError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_KEYS = 20  # the most keys that a message names

MISSING = object()

_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}


def find(value: dict[str, Any], key: str) -> Any:
    """The value under ``key`` in an object. Without such a key, dots lead into nested objects: "a.b" is key b of object a.

    Returns:
        The value; None if one of the nested objects is null; ``MISSING`` if there is no such key.
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
        where: the name of the record in errors: "FILE line 3".
        hint: the end of error messages: how to read the file as plain text if it only looks like JSON. May be empty.

    Raises:
        UserError: There is no such key, or the value under the key is neither a string nor null.
    """
    value = find(record, key)
    if value is MISSING:
        raise missing_key(where, key, keys_of(record, key), hint=hint)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where} has {type_name(value)} under {key!r}, but the text must be a string (--data.text_key).")
    return utf8(value or "")


def keys_of(value: dict[str, Any], key: str) -> list[str]:
    """The keys of object ``value`` that a user could give instead of ``key``. A key of a nested object is written "a.b"."""
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
        kind: "key" for a record of JSON, "column" for a table.
        what: the content that the key should have: "text" or "messages".
        hint: the end of the message: how to read the file as plain text if it only looks like JSON. May be empty.
        mend: the advice to the user. Empty: the advice is to name another key.
    """
    names = list(keys)
    shown = ", ".join(names[:_MOST_KEYS]) + (f" and {len(names) - _MOST_KEYS} more" if len(names) > _MOST_KEYS else "")
    has = f"it has {shown}" if names else "it has none"
    mend = mend or f"name the {kind} that holds the {what} (--data.{what}_key)"
    if what == "text" and {"messages", "conversations"} & set(names):
        mend += ", or prepare conversations with --chat_template auto (docs/chat.md)"
    return UserError(f"{where} has no {kind} {key!r}, {has}: {mend}{hint}.")

"""Find the value that a key leads to, and say what is wrong with a value that is no text."""

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
    """The value under ``key``. If there is no such key, its dots lead into objects. None below a null; else ``MISSING``."""
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
    """The text under ``key`` of a record as UTF-8; empty if it is null.

    Args:
        where: names the record in messages: "FILE line 3".
        hint: how to read a file as plain text that only looks like JSON; may be empty.

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
    """The keys that ``find`` could have taken instead of ``key``; those of inner objects with dots."""
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
        kind: "key" or "column".
        what: the content under the key, "text" or "messages".
        mend: what to do; empty: to name the key.
    """
    names = list(keys)
    shown = ", ".join(names[:_MOST_KEYS]) + (f" and {len(names) - _MOST_KEYS} more" if len(names) > _MOST_KEYS else "")
    has = f"it has {shown}" if names else "it has none"
    mend = mend or f"name the {kind} that holds the {what} (--data.{what}_key)"
    return UserError(f"{where} has no {kind} {key!r}, {has}: {mend}{hint}.")

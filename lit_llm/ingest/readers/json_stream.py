"""Read one string out of a JSON object of any length, in bounded memory.

Python's parser needs the whole object in memory. This one needs a few hundred kB, and leaves the decoding of strings to it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from json import JSONDecodeError

from lit_llm.ingest.readers.text_value import no_text

CHUNK_BYTES = 2**16
"""About how many bytes of the object are looked at together."""
_LONGEST_SCALAR = 2**16  # characters of a number
_MOST_KEYS_KEPT = 100
_LONGEST_KEY_KEPT = 2**16

_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
# As much of a string as is complete: up to the closing quote, to an incomplete escape, or to the end.
_COMPLETE = re.compile(r'[^"\\]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\]*)*')
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_ESCAPE = 6  # of \u0041

_PARSER = json.JSONDecoder(parse_int=float)  # int() refuses more than 4,300 digits


def parse(text: str) -> object:
    """The value that ``text`` spells. All numbers become float.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return _PARSER.decode(text)
    except RecursionError:
        raise JSONDecodeError("nested too deeply", "", 0) from None


class JsonStream:
    """One JSON object, given in parts of any size.

    Args:
        chunks: the object in UTF-8.
        where: names the object in messages: "FILE line 3".
    """

    def __init__(self, chunks: Iterator[bytes], where: str) -> None:
        self._chunks, self._where = chunks, where
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._buffer, self._at = "", 0
        self.found = False
        """Whether the key was there."""
        self.keys: list[str] = []
        """The first keys of the objects on the way, with dots."""

    def text(self, key: str) -> Iterator[str]:
        """The string under ``key`` in parts; nothing if it is null or empty. ``key`` is read as `text_value.find` does.

        Raises:
            ValueError: The object is not JSON, has the key twice, or is not UTF-8.
            UserError: The value is not a string.
        """
        try:
            if self._next() != "{":
                raise self._error("no object")
            yield from self._member(key, key, "")
            if self._next() is not None:
                raise self._error("more than one value")
        except RecursionError:
            raise self._error("nested too deeply") from None

    def _member(self, key: str, whole_key: str, above: str) -> Iterator[str]:
        """Read an object, and the text under ``key`` in it. ``above`` and dots lead to the object from the outermost."""
        first, dot, rest = key.partition(".")
        for _ in self._items("}"):
            name = self._key()
            self._take(":")
            start = self._next()
            below = dot and name == first
            if name == key or (below and start == "n"):  # below null is null
                yield from self._text(whole_key, start)
            elif below and start == "{":
                yield from self._member(rest, whole_key, f"{above}{name}.")
            else:
                if len(self.keys) < _MOST_KEYS_KEPT:
                    self.keys.append(above + name)
                self._skip()

    def _text(self, key: str, start: str | None) -> Iterator[str]:
        if self.found:
            raise self._error(f"the key {key!r} is given twice")
        self.found = True
        if start == '"':
            yield from self._string()
        elif start == "{":
            raise no_text(self._where, key, "an object")
        elif start == "[":
            raise no_text(self._where, key, "an array")
        else:
            value = self._scalar()
            if value is not None:
                raise no_text(self._where, key, "true or false" if isinstance(value, bool) else "a number")

    def _key(self) -> str:
        parts, length = [], 0
        for part in self._string():
            if length < _LONGEST_KEY_KEPT:  # of a longer key, enough is kept to differ from every key that is asked for
                parts.append(part)
            length += len(part)
        return "".join(parts) if length < _LONGEST_KEY_KEPT else "".join(parts) + "…"

    def _skip(self) -> None:
        """Read a value of any kind."""
        start = self._next()
        if start == "{":
            for _ in self._items("}"):
                self._skip_string()
                self._take(":")
                self._skip()
        elif start == "[":
            for _ in self._items("]"):
                self._skip()
        elif start == '"':
            self._skip_string()
        else:
            self._scalar()

    def _skip_string(self) -> None:
        for _ in self._string():
            pass

    def _items(self, closing: str) -> Iterator[None]:
        """Read the brackets of an object or array, and the commas in it. The caller reads an item each time."""
        self._at += 1
        if self._next() == closing:
            self._at += 1
            return
        while True:
            yield
            following = self._next()
            if following not in (",", closing):
                raise self._error("a comma is missing")
            self._at += 1
            if following == closing:
                return

    def _take(self, expected: str) -> None:
        if self._next() != expected:
            raise self._error(f"{expected} is missing")
        self._at += 1

    def _scalar(self) -> object:
        """A number, true, false or null."""
        start = self._buffer[self._at : self._at + 1]
        token = ""
        while True:
            match = _SCALAR.match(self._buffer, self._at)
            assert match is not None
            token += match.group()
            self._at = match.end()
            if len(token) > _LONGEST_SCALAR:
                raise self._error("a number is too long")
            if self._at < len(self._buffer) or not self._more():
                break
        if not token:
            raise self._error(f"unexpected {start!r}")
        return parse(token)

    def _string(self) -> Iterator[str]:
        """A string in parts, without the quotes."""
        self._take('"')
        while True:
            match = _COMPLETE.match(self._buffer, self._at)
            assert match is not None
            body, end = match.group(), match.end()
            following = self._buffer[end : end + _ESCAPE]
            if following[:1] == '"':
                self._at = end + 1
                yield _decoded(body)
                return
            if len(following) == _ESCAPE:
                raise self._error("wrong escape in a string")
            body = body[: _whole(body)]
            self._at += len(body)
            if body:
                yield _decoded(body)
            if not self._more():
                raise self._error("a string does not end")

    def _next(self) -> str | None:
        """The next character that is no space, which is not read yet; None at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at : self._at + 1]
            if not self._more():
                return None

    def _more(self) -> bool:
        """Forget what is read and add the next chunk. False at the end."""
        chunk = next(self._chunks, None)
        self._buffer = self._buffer[self._at :] + self._decoder.decode(chunk or b"", final=chunk is None)
        self._at = 0
        return chunk is not None

    def _error(self, what: str) -> JSONDecodeError:
        return JSONDecodeError(what, "", 0)


def _decoded(body: str) -> str:
    value = parse(f'"{body}"')
    assert isinstance(value, str)
    return value


def _whole(body: str) -> int:
    """How much of a part of a string can be decoded without the rest: not half a surrogate pair."""
    match = _HIGH_SURROGATE.search(body, max(0, len(body) - _ESCAPE))
    if match is None:
        return len(body)
    before = body[: match.start()]
    backslashes = len(before) - len(before.rstrip("\\"))
    return match.start() if backslashes % 2 == 0 else len(body)

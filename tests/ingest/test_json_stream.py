"""The parser of long JSON objects agrees with Python's, wherever its input is cut."""

from __future__ import annotations

import json
import random

import pytest

from lit_llm.ingest.readers.json_stream import JsonStream

LETTERS = ["a", "é", "😀", "\\", '"', "\n", "/", "\x00", "\x7f", "\ud83d", "\ude00", "u0041", "\u2028", "{", "]", ":", ","]


def parts(text: bytes, size: int):
    return (text[i : i + size] for i in range(0, len(text), size))


def read(text: bytes, key: str, size: int) -> str | None:
    """The string under ``key``; None without the key."""
    stream = JsonStream(parts(text, size), "here")
    found = "".join(stream.text(key))
    return found if stream.found else None


def some_string(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(12)))


def some_value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(9 if depth else 6)
    if kind < 6:
        return [
            None,
            True,
            False,
            rng.randrange(-(10**20), 10**20),
            rng.random() * 10 ** rng.randrange(-9, 9),
            some_string(rng),
        ][kind]
    if kind == 6:
        return [some_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {some_string(rng): some_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def test_it_finds_what_pythons_parser_finds_wherever_the_object_is_cut():
    rng = random.Random(0)
    for _ in range(300):
        expected = some_string(rng)
        members = {f"k{i}": some_value(rng, 3) for i in range(rng.randrange(4))}
        nested = rng.random() < 0.5
        members["meta" if nested else "text"] = {"x": some_value(rng, 1), "a.b": expected} if nested else expected
        keys = list(members)
        rng.shuffle(keys)
        spelled = json.dumps(
            {key: members[key] for key in keys}, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 0, 3])
        )
        text = spelled.encode("utf-8", "surrogatepass")
        try:
            text.decode()
        except UnicodeDecodeError:  # a lone surrogate that is not escaped: no JSON
            continue
        expected = json.loads(text)["meta"]["a.b"] if nested else json.loads(text)["text"]
        for size in (1, 2, 3, 5, 7, rng.randrange(1, 40), len(text)):
            got = read(text, "meta.a.b" if nested else "text", size)
            # A pair that is cut is not joined in a str, but it is in UTF-16.
            assert got is not None
            assert got.encode("utf-16", "surrogatepass") == expected.encode("utf-16", "surrogatepass"), (text, size)


def test_it_refuses_what_pythons_parser_refuses():
    rng = random.Random(1)
    refused = 0
    for _ in range(800):
        text = bytearray(json.dumps({"id": some_value(rng, 2), "text": some_string(rng), "z": some_value(rng, 2)}).encode())
        if rng.random() < 0.5:
            text[rng.randrange(1, len(text))] = rng.choice(b'"\\{}[],:0 nul\x01\xff')
        else:
            del text[rng.randrange(1, len(text)) :]
        try:
            expected = json.loads(text.decode())
        except ValueError:
            refused += 1
            for size in (1, 3, 1000):
                with pytest.raises(ValueError):
                    read(bytes(text), "nothing\0", size)
            continue
        assert isinstance(expected, dict)
        for size in (1, 3, 1000):
            assert read(bytes(text), "nothing\0", size) is None
    assert 200 < refused < 750


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        (r'{"t": "a\ud83d\ude00b"}', "a😀b"),
        (r'{"t": "\\ud83d"}', r"\ud83d"),
        (r'{"t": "\\\ud83d\ude00\\"}', "\\😀\\"),
        (r'{"t": "\"\/\b\f\n\r\t"}', '"/\b\f\n\r\t'),
        ('{"t": "é😀"}', "é😀"),
        ('{"t": ""}', ""),
        ('{"t": null}', ""),
    ],
)
def test_escapes_and_characters_may_be_cut_anywhere(spelled, expected):
    for size in range(1, 12):
        assert read(spelled.encode(), "t", size) == expected


def test_a_key_that_contains_the_dots_and_a_key_below_are_told_apart():
    for size in (1, 4, 100):
        assert read(b'{"a.b": "x", "a": {"c": "y"}}', "a.b", size) == "x"
        assert read(b'{"a": {"c": "y", "b": "x"}, "c": 1}', "a.b", size) == "x"
        assert read(b'{"a": null}', "a.b", size) == ""
        assert read(b'{"a": "b"}', "a.b", size) is None
        with pytest.raises(ValueError, match="twice"):
            read(b'{"a": {"b": "y"}, "a.b": "x"}', "a.b", size)


def test_deep_nesting_is_refused_without_a_recursion_error():
    with pytest.raises(ValueError, match="deep"):
        read(b'{"a": ' + b"[" * 100_000, "t", 1000)

"""One way of writing text, against examples written by hand."""

from __future__ import annotations

import pytest

from lit_llm.clean.normalise import FixEncoding, normalise


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("e\u0301", "\u00e9"),
        ("a\r\nb\rc\u2028d\u2029e\x85f", "a\nb\nc\nd\ne\nf"),
        ("a\x00b\x1bc\x7fd\u0085\ufeff\ufffe\uffffe\x0cf", "abcd\ne\nf"),
        ("  def f():  \n\tx\u00a0\n", "  def f():\n\tx\n"),
        ("\n\n a\n \n\t\n\n\nb\n", " a\n\nb\n"),
        ("def f():\n    return 1\n", "def f():\n    return 1\n"),
        ("a\r\n \n\x00\n", "a\n"),
        ("\ufb01 \u00b2 a\u00a0b \U0001f600", "\ufb01 \u00b2 a\u00a0b \U0001f600"),
        (" \n\t\r\n", ""),
        ("the end\fNext page\va\x1cb\x1fc", "the end\nNext page\na\nb c"),
    ],
)
def test_examples(text, expected):
    assert normalise(text) == expected


def test_text_of_the_wrong_encoding_is_repaired_and_other_text_stays():
    fix = FixEncoding()
    russian, japanese = "\u041f\u0440\u0438\u0432\u0435\u0442", "\u6771\u4eac\u306f\u5927\u304d\u3044"
    for text in ("caf\u00e9 \u2014 \u201cquoted\u201d", russian, japanese, "plain"):
        assert fix(text) == text
        assert fix(text.encode().decode("latin-1")) == text

"""Languages, and the rules of Gopher and C4 at their limits."""

from __future__ import annotations

import pytest

from lit_llm.clean.language import Language
from lit_llm.clean.quality import Quality
from lit_llm.clean.rules import Removed

SENTENCES = {
    "en": "The committee will meet again next week to discuss the remaining questions.",
    "de": "Der Ausschuss trifft sich nächste Woche wieder, um die übrigen Fragen zu besprechen.",
    "fr": "Le comité se réunira de nouveau la semaine prochaine pour examiner les autres questions.",
    "ja": "委員会は来週再び会合を開き、残りの問題について話し合う予定です。",
    "ru": "Комитет соберётся снова на следующей неделе, чтобы обсудить оставшиеся вопросы.",
}


def test_a_document_is_kept_if_its_language_is_wanted():
    rule = Language(("en", "de"), 0.5)
    for code, text in SENTENCES.items():
        result = rule(text)
        assert result == text if code in ("en", "de") else isinstance(result, Removed) and result.rule == f"languages/{code}"
    uncertain = rule("12 34 56")
    assert isinstance(uncertain, Removed)
    certain = Language(("en",), 1.0)(SENTENCES["en"])
    assert isinstance(certain, Removed) and certain.rule == "languages/uncertain"


def test_the_middle_and_the_end_of_a_long_document_count():
    english, german = (SENTENCES[code] * (20_000 // len(SENTENCES[code])) for code in ("en", "de"))
    assert Language(("de",), 0.5)(english[:1000] + german) == english[:1000] + german


def words(count: int, word: str = "and the word") -> str:
    return " ".join((word.split() * count)[:count])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (words(49), "short_doc"),
        (words(79, "and the word") + " 1234" * 21, "below_alpha_threshold"),
        (" \n", "empty"),
    ],
)
def test_gopher_quality_at_its_limits(text, reason):
    result = Quality("gopher_quality")(text)
    expected = text if reason is None else Removed(f"gopher_quality/{reason}", "")
    assert result == expected


def test_gopher_repetition_counts_equal_lines():
    lines = [f"{i} {i * i} {i**3}" for i in range(100)]
    kept = "\n".join(lines[:80] + lines[:5])  # 5 of 85 lines are repeated
    assert Quality("gopher_repetition")(kept) == kept
    result = Quality("gopher_repetition")("\n".join(lines[:65] + lines[:35]))  # 35 of 100, 30 % are allowed
    assert isinstance(result, Removed) and result.rule == "gopher_repetition/dup_line_frac"


def test_c4_drops_lines_and_documents():
    rule = Quality("c4")
    sentences = [f"This is sentence number {i}." for i in range(5)]
    text = "\n".join([*sentences[:2], "No mark at the end", "Too short.", "Please enable Javascript now.", *sentences[2:]])
    assert rule(text) == "\n".join(sentences)
    assert rule(" ".join(sentences)) == " ".join(sentences)  # five sentences on one line
    four = rule("\n".join(sentences[:4]))
    assert isinstance(four, Removed) and four.rule == "c4/too_few_sentences"

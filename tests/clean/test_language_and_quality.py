"""Languages, and the rules of Gopher and C4 at their limits."""

from __future__ import annotations

import pickle

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
        (words(49), "short_doc: 49 words, 50 at least"),
        (words(50), None),
        (words(100_000), None),
        (words(100_001), "long_doc: 100001 words, 100000 at most"),
        (words(50, "be to it"), "below_avg_threshold: mean word length 2, 3 at least"),  # 2 letters a word, 3 are needed
        # (17 (3 + 3 + 26) - 26) / 50 letters
        (words(50, "the and abcdefghijklmnopqrstuvwxyz"), "above_avg_threshold: mean word length 10.36, 10 at most"),
        (words(90, "and the word") + " # #" * 5, None),  # 10 of 100 words
        (words(89, "and the word") + " # #" * 5 + " #", "too_many_hashes: 0.11 # for each word, 0.1 at most"),  # 11 of 100
        (words(80, "and the word") + " 1234" * 20, None),  # 80 % of the words have a letter
        (words(79, "and the word") + " 1234" * 21, "below_alpha_threshold: 0.79 of the words have a letter, 0.8 at least"),
        ("\n".join(["- " + words(10)] * 9 + [words(10)]), None),  # 90 % of the lines are bullets
        ("\n".join(["- " + words(10)] * 10), "too_many_bullets: 1 of the lines start with a bullet, 0.9 at most"),
        (words(60, "some other text"), "enough_stop_words: 0 different stop words, 2 at least"),  # fewer than two stop words
        (" \n", "empty: no text"),
    ],
)
def test_gopher_quality_at_its_limits(text, reason):
    result = Quality("gopher_quality")(text)
    expected = text if reason is None else Removed(*f"gopher_quality/{reason}".split(": "))
    assert result == expected


def test_punctuation_marks_are_not_words():
    # spaCy's words are half marks here, but 80 % must have letters.
    text = words(60, "call(the, word)[and] with to that;")
    assert Quality("gopher_quality")(text) == text


def test_gopher_repetition_counts_equal_lines():
    lines = [f"{i} {i * i} {i**3}" for i in range(100)]
    kept = "\n".join(lines[:80] + lines[:5])  # 5 of 85 lines are repeated
    assert Quality("gopher_repetition")(kept) == kept
    result = Quality("gopher_repetition")("\n".join(lines[:65] + lines[:35]))  # 35 of 100, 30 % are allowed
    assert isinstance(result, Removed) and result.rule == "gopher_repetition/dup_line_frac"
    assert result.detail == "0.35 of the lines are repeated, 0.3 at most"
    words = [f"w{i}" for i in range(10, 60)]
    result = Quality("gopher_repetition")(" ".join([*words, *words[:10]]))  # one 9-gram of 27 characters, of 239
    assert result == Removed(
        "gopher_repetition/duplicated_9_n_grams", "0.113 of the characters are in repeated 9-grams, 0.11 at most"
    )


def test_c4_drops_lines_and_documents():
    rule = Quality("c4")
    sentences = [f"This is sentence number {i}." for i in range(5)]
    text = "\n".join([*sentences[:2], "No mark at the end", "Too short.", "Please enable Javascript now.", *sentences[2:]])
    assert rule(text) == "\n".join(sentences)
    assert rule(" ".join(sentences)) == " ".join(sentences)  # five sentences on one line
    four = rule("\n".join(sentences[:4]))
    assert isinstance(four, Removed) and four.rule == "c4/too_few_sentences"
    assert four.detail == "4 sentences in the lines that end like sentences, 5 at least"
    curly = rule(text + "\nThis is { a line.")
    assert isinstance(curly, Removed) and curly.rule == "c4/curly_bracket"


def test_rules_can_be_sent_to_a_worker():
    for rule in (Quality("c4"), Quality("gopher_quality")):
        assert isinstance(pickle.loads(pickle.dumps(rule))("short"), Removed)

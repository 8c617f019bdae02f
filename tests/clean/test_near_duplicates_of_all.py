"""Near-duplicates among all documents: against exact sets of n-grams, and which one of a pair is kept."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from clean.clean_runs import kept_numbers, write

from lit_llm.clean.word_ngrams import bands_of, words


def document(seed: int, count: int = 300) -> list[str]:
    draw = random.Random(seed)
    return [f"w{draw.randrange(10**6)}" for _ in range(count)]


def edited(text: list[str], share: float, seed: int) -> list[str]:
    draw, copy = random.Random(seed), list(text)
    for i in draw.sample(range(len(text)), round(share * len(text))):
        copy[i] = f"new{draw.randrange(10**6)}"
    return copy


def jaccard(one: list[str], other: list[str], ngram: int) -> float:
    """Of the sets of n-grams, counted."""
    a, b = ({tuple(text[i : i + ngram]) for i in range(len(text) - ngram + 1)} for text in (one, other))
    return len(a & b) / len(a | b)


def test_words_have_no_case_and_no_punctuation_and_are_characters_where_no_spaces_are():
    assert words("Don't STOP, x_1 (3.5)!") == ["don", "t", "stop", "x_1", "3", "5"]
    assert words("Äpfel, naïve; Don't x_1") == ["äpfel", "naïve", "don", "t", "x_1"]
    assert words("東京は big. ไทย") == ["東", "京", "は", "big", "ไ", "ท", "ย"]


@pytest.mark.parametrize("threshold", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("permutations", [16, 128])
def test_bands_miss_few_pairs_at_the_threshold_and_have_no_room_for_more_values(threshold, permutations):
    def missed(rows: int) -> float:
        return (1 - threshold**rows) ** (permutations // rows)

    bands, rows = bands_of(threshold, permutations)
    assert bands == permutations // rows and missed(rows) <= 0.02
    assert rows == permutations or missed(rows + 1) > 0.02


def test_the_first_is_kept_and_a_chain_of_changes_is_not_one_document(tmp_path):
    first = document(1)
    second = edited(first, 0.04, 1)
    third = edited(second, 0.08, 2)
    assert jaccard(first, second, 5) > 0.6 and jaccard(second, third, 5) > 0.45 and jaccard(first, third, 5) < 0.38
    other = document(2)
    texts = [" ".join(text) for text in (first, second, other, third, first)]
    kept, report = kept_numbers(
        [write(tmp_path / "a.jsonl", texts)], tmp_path / "out", near_duplicates=0.42, near_permutations=1024
    )
    assert kept == [1, 3, 4]  # the third text nearly repeats the second one only, which is not there
    samples = [json.loads(line) for line in (tmp_path / "out/removed.jsonl").read_text().splitlines()]
    assert {(one["source"][-1], one["detail"][-1]) for one in samples} == {("2", "1"), ("5", "1")}
    assert report["steps"]["near_duplicates"]["removed"]["near_duplicates"]["documents"] == 2


def test_planted_copies_are_found_and_nothing_else_is_removed(tmp_path):
    originals = [document(seed) for seed in range(200)]
    copies = [edited(text, 0.02, seed) for seed, text in enumerate(originals)]  # 0.98 ** 5 = 90 % of n-grams, Jaccard 0.82
    far = [edited(text, 0.3, seed) for seed, text in enumerate(originals)]  # 0.7 ** 5 = 17 %, Jaccard 0.09
    files = [
        write(tmp_path / f"{name}.jsonl", [" ".join(text) for text in texts])
        for name, texts in {"a": originals, "b": copies, "c": far}.items()
    ]
    kept, _ = kept_numbers(files, tmp_path / "out", near_duplicates=0.6)
    assert kept == [*range(1, 201), *range(1, 201)]  # of a.jsonl and c.jsonl


def test_texts_without_words_repeat_only_each_other(tmp_path):
    texts = ["!!!", "???", "one two", "...", "!!!", "One, two!", "one two three"]
    kept, _ = kept_numbers([write(Path(tmp_path) / "a.jsonl", texts)], tmp_path / "out", near_duplicates=0.7)
    assert kept == [1, 2, 3, 4, 7]

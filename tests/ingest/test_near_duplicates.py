"""Near-duplicates of held-out documents, against sets of shingles and copies made by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ingest.tokenizer_kinds import pages

from lit_llm.ingest.near_duplicates import SHINGLE_BYTES, Checker, HeldOutIndex, Sketcher

WORDS = [
    f"{a}{b}{c}" for a in ("re", "un", "de", "con") for b in ("st", "pl", "mit", "form", "late") for c in ("ing", "ed", "s")
]


def sketch(text: bytes) -> np.ndarray:
    sketcher = Sketcher()
    sketcher.add(text)
    return sketcher.sketch()


def checked(index: HeldOutIndex, text: bytes, cuts: tuple[int, ...] = ()) -> Checker:
    checker = Checker(index)
    for start, stop in zip((0, *cuts), (*cuts, len(text)), strict=True):
        checker.add(text[start:stop])
    return checker


def document(seed: int, words: int = 300) -> bytes:
    chosen = random.Random(seed).choices(WORDS, k=words)
    return " ".join(chosen).encode()


def edited(text: bytes, share: float, seed: int) -> bytes:
    """A copy with this share of the words replaced."""
    generator = random.Random(seed)
    words = text.split()
    for i in generator.sample(range(len(words)), round(share * len(words))):
        words[i] = b"%d" % generator.randrange(10**6)
    return b" ".join(words)


def shingles(text: bytes) -> set[bytes]:
    text = b"".join(text.lower().split())
    return {text[i : i + SHINGLE_BYTES] for i in range(len(text) - SHINGLE_BYTES + 1)}


@pytest.mark.parametrize("text", [b"x", b"One short line.", document(1), document(2, 5000), b"0" * 10_000, b"ab " * 5000])
def test_equal_documents_are_found_whatever_their_length(text: bytes) -> None:
    index = HeldOutIndex([sketch(document(100)), sketch(text), sketch(b"")])
    assert checked(index, text).duplicate
    assert checked(index, b"\n" + text.upper().replace(b" ", b"\t\r\n")).duplicate
    assert not checked(index, text[:-1] + b"?").equal
    assert not checked(index, b"unlike all others").duplicate
    assert not checked(index, b"").duplicate


def test_the_part_is_that_of_the_sets_of_shingles() -> None:
    held_out = [document(seed) for seed in range(5)]
    index = HeldOutIndex([sketch(text) for text in held_out])
    text = document(0)[:1000] + document(3)[500:] + document(9)
    named, parts = checked(index, text).contained()
    expected = [len(shingles(text) & shingles(other)) / len(shingles(other)) for other in held_out]
    found = dict(zip(named.tolist(), parts.tolist(), strict=True))
    for i, part in enumerate(expected):  # 64 draws: a standard deviation of at most 1 / 16
        assert found.get(i, 0) == pytest.approx(part, abs=0.2 if part else 0)
    assert sum(part > 0.3 for part in expected) == 2


@pytest.mark.parametrize("text", [document(1, 20_000), 400 * document(1, 60)])  # several chunks; one part again and again
def test_pieces_change_nothing(text: bytes) -> None:
    index = HeldOutIndex([sketch(document(1)), sketch(text), sketch(pages().encode())])
    whole = checked(index, text).contained()
    for cuts in ((1,), (31, 32, 33), (7, 100, 40_000), tuple(range(1, 3000, 7))):
        parts = checked(index, text, cuts).contained()
        assert [part.tolist() for part in parts] == [part.tolist() for part in whole]
        assert checked(index, text, cuts).equal
        sketcher = Sketcher()
        for start, stop in zip((0, *cuts), (*cuts, len(text)), strict=True):
            sketcher.add(text[start:stop])
        assert sketcher.sketch().tolist() == sketch(text).tolist()


def test_copies_with_changed_words_are_found_and_other_documents_are_not() -> None:
    index = HeldOutIndex([sketch(document(seed)) for seed in range(100)])
    found = [checked(index, edited(document(seed), 0.04, seed)).duplicate for seed in range(100)]
    assert sum(found) == 100  # a shingle touches about four words: (1 - 0.04) ** 4 = 85 % of the shingles stay
    assert not any(checked(index, edited(document(seed), 0.5, seed)).duplicate for seed in range(100))
    assert not any(checked(index, document(seed)).duplicate for seed in range(200, 400))


def test_a_common_licence_makes_no_duplicate_of_a_long_document() -> None:
    licence = document(1, 80)
    short, long = licence + b"\n" + document(2, 10), licence + b"\n" + document(3, 1000)
    index = HeldOutIndex([sketch(licence), sketch(short)])
    parts = checked(index, long).contained()[1]
    assert parts.max() > 0.8  # of the held-out documents
    assert not checked(index, long).duplicate
    assert checked(index, licence + b"\n" + document(4, 10)).duplicate

"""Documents that contain n-grams of reference documents, counted again with sets of tuples of words."""

from __future__ import annotations

import random
import re

from lit_llm.clean.contamination import Contamination, ReferenceIndex
from lit_llm.clean.rules import Document, Removed
from lit_llm.clean.word_ngrams import word_hashes

SENTENCE = "Twelve small boats left the old harbour at dawn; none of them came back."  # 14 words


def index(*texts: str, n: int = 13) -> ReferenceIndex:
    return ReferenceIndex((Document(text, f"test.jsonl:{i}") for i, text in enumerate(texts, start=1)), n=n)


def removed(text: str, *references: str, n: int = 13, share: float = 0.0) -> bool:
    return isinstance(Contamination(index(*references, n=n), share=share)(text), Removed)


def test_words_are_runs_of_letters_and_digits():
    text = "It's 3.5 km – naïve ÜBER_maß,\n東京は\tx² " + "long " * 20_000 + "a" * 300_000 + " end"
    # "x²" is "x2" after NFKC. Each character of a script without spaces is a word.
    expected = ["it", "s", "3", "5", "km", "naïve", "über", "maß", "東", "京", "は", "x2", *["long"] * 20_000]
    hashes = word_hashes(text).tolist()
    known = dict(zip(expected, hashes, strict=False))
    assert hashes[: len(expected)] == [known[word] for word in expected]
    assert len(set(known.values())) == len(known) == 13
    assert hashes[-1] == word_hashes("END!").tolist()[0]
    assert word_hashes("x²").tolist() == word_hashes("x2").tolist()
    assert word_hashes("").tolist() == word_hashes(" .,- \n").tolist() == []


def test_one_common_n_gram_is_enough_whatever_the_case_and_punctuation():
    words = re.findall(r"\w+", SENTENCE)
    assert removed("Before. " + "\n".join(words[:13]).upper() + "... after", SENTENCE)
    assert not removed("Before. " + " ".join(words[:12]) + " by after", SENTENCE)
    assert not removed("Before. " + " ".join([*words[:6], "x", *words[6:]]), SENTENCE)


def test_short_reference_documents_are_found_as_a_whole():
    eight, seven = "who wrote the first book of this series", "who wrote the second book of this"
    assert removed(f"Q: {eight}? Anna.", SENTENCE, eight)
    assert not removed(f"Q: {eight[4:]}? Anna.", SENTENCE, eight)
    assert not removed(f"Q: {seven}? Anna.", SENTENCE, seven)
    assert index(SENTENCE, seven, eight).too_short == 1
    found = Contamination(index(SENTENCE, seven, eight), share=0)(eight)
    assert isinstance(found, Removed) and found.detail == "100.0% of the n-grams of test.jsonl:3"


def test_shares_are_those_of_sets_of_n_grams():
    draw = random.Random(0)
    vocabulary = [f"w{i}" for i in range(3)]  # few, so that n-grams repeat, within a document and between them

    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}

    references = [" ".join(draw.choices(vocabulary, k=draw.randint(8, 300))) for _ in range(20)]
    references.append(references[0])
    built = index(*references, n=8)
    for _ in range(15):
        text = " ".join(draw.choices(vocabulary, k=draw.randint(0, 2000)))
        of_text = grams(text)
        common = [len(grams(one) & of_text) for one in references]
        documents, found = built.matches(text)
        assert dict(zip(documents.tolist(), found.tolist(), strict=True)) == {i: n for i, n in enumerate(common) if n}
        most = max(n / len(grams(one)) for n, one in zip(common, references, strict=True))
        for share in (most, most + 1e-9):
            assert isinstance(Contamination(built, share=share)(text), Removed) == (0 < share <= most)

"""Find documents that repeat an earlier document: exactly, or with nearly the same word n-grams.

A finder is called with the documents one after the other, in order. Of several similar documents, the first is kept.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice

from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.rules import Document
from lit_llm.clean.word_ngrams import SEED, bands_of, words
from lit_llm.core.errors import need

_SIGNED_TOGETHER = 2**20
"""The number of characters in a chunk of a text, whose words are in memory together. N-grams across two chunks are left out."""

Finder = Callable[[Document], str | None]
"""A function that takes a document. It returns a phrase that names the earlier document that this document repeats, or None."""


class ExactDuplicates:
    """Finds documents that equal an earlier one but for whitespace and Unicode form. Called with one document after the other.
    Memory: 250 bytes for each document that is kept."""

    def __init__(self) -> None:
        self._sources: dict[bytes, str] = {}

    def __call__(self, document: Document) -> str | None:
        whole = hashlib.blake2b(plain(document.text).encode(), digest_size=16).digest()
        if whole in self._sources:
            return f"equals {self._sources[whole]}"
        self._sources[whole] = document.source
        return None


def plain(text: str) -> str:
    """``text`` in Unicode NFC, with one space in place of each run of whitespace, and none at the start and the end."""
    return " ".join(unicodedata.normalize("NFC", text).split())


class NearDuplicates:
    """Finds documents whose MinHash signature is like an earlier document's. Called with one document after the other.
    Memory: 3 KB for each document that is kept.

    The package rensa compares a document with the documents kept so far that share a band of its signature. So if b repeats a,
    and c repeats b but not a, then b is removed and c is kept.

    Args:
        threshold: a document is a duplicate if at least this share of its signature's values equals an earlier document's.
        ngram: words in an n-gram. Case and punctuation do not count.
        permutations: values in a signature, at most. The standard error of a similarity s is sqrt(s (1 - s) / permutations).

    Raises:
        UserError: The package rensa is not installed.
    """

    def __init__(self, threshold: float, *, ngram: int, permutations: int) -> None:
        rensa = need("rensa", what="near_duplicates")
        bands, rows = bands_of(threshold, permutations)
        self._ngram, self._values, self._sketch = ngram, bands * rows, rensa.RMinHash
        self._deduplicator = rensa.RMinHashDeduplicator(threshold, self._values, use_lsh=True, num_bands=bands, seed=SEED)

    def __call__(self, document: Document) -> str | None:
        sketch = self._sketch(self._values, SEED)
        for ngrams in self._ngrams(document.text):
            sketch.update(ngrams)
        if self._deduplicator.add(document.source, sketch):
            return None
        return f"like {min(self._deduplicator.get_duplicates(sketch))}"

    def _ngrams(self, text: str) -> Iterator[list[str]]:
        """Yield a list of the n-grams of each chunk of a text. A text with fewer words than an n-gram is one n-gram."""
        any_ngram = False
        for start in range(0, len(text), _SIGNED_TOGETHER):
            chunk_words = words(text[start : start + _SIGNED_TOGETHER])
            ngrams = list(map(" ".join, zip(*(islice(chunk_words, first, None) for first in range(self._ngram)), strict=False)))
            any_ngram |= bool(ngrams)
            yield ngrams
        if not any_ngram:
            yield [" ".join(words(text)) or text.strip()]


def finders_of(settings: CleanSettings) -> dict[str, Finder]:
    """Name of a step → its finder of duplicates, for the steps that are switched on, in the order in which they run.

    Raises:
        UserError: A package is not installed.
    """
    finders: dict[str, Finder] = {}
    if settings.exact_duplicates:
        finders["exact_duplicates"] = ExactDuplicates()
    if settings.near_duplicates is not None:
        finders["near_duplicates"] = NearDuplicates(
            settings.near_duplicates, ngram=settings.near_ngram, permutations=settings.near_permutations
        )
    return finders

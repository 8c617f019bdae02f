"""MinHash signatures: two documents have about as many equal values as their sets of n-grams have in common (Jaccard)."""

from __future__ import annotations

import re
from functools import partial
from itertools import islice
from types import ModuleType

import numpy as np

from lit_llm.clean.word_ngrams import WORD_PATTERN
from lit_llm.core.errors import need

SEED = 1
MOST_MISSED = 0.02
"""Of pairs as similar as the threshold, at most this part shares no band, so that they are not compared."""

_CHUNK = 2**20  # characters. N-grams across the ends of a chunk are left out, so that memory is bounded.
_WORD = re.compile(WORD_PATTERN)
_ASCII = bytes(b if chr(b).isalnum() or b == ord("_") else 32 for b in bytes(range(128)).lower()) + bytes(128)


class Signer:
    """Sign documents.

    Args:
        ngram: words in an n-gram. Case and punctuation do not count.
        permutations: values in a signature. The standard error of a similarity s is sqrt(s (1 - s) / permutations).

    Raises:
        UserError: The package rensa is not installed.
    """

    def __init__(self, ngram: int, permutations: int) -> None:
        self._ngram, self._permutations = ngram, permutations
        self._sketch = partial(_rensa().RMinHash, num_perm=permutations, seed=SEED)

    def sign(self, text: str) -> np.ndarray:
        """(permutations,) uint32. A text of fewer words than an n-gram is one n-gram, and so is one without words."""
        sketch, any_ngram = self._sketch(), False
        for start in range(0, len(text), _CHUNK):
            ngrams = _ngrams(words(text[start : start + _CHUNK]), self._ngram)
            sketch.update(ngrams)
            any_ngram |= bool(ngrams)
        if not any_ngram:
            sketch.update([" ".join(words(text)) or text.strip()])
        return np.array(sketch.digest(), dtype=np.uint32)

    def identity(self) -> list[str]:
        """Differs if the signature of a text can differ."""
        return [f"rensa {_rensa().RMinHash.ALGORITHM_VERSION}", str(SEED), str(self._ngram), str(self._permutations)]


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    if text.isascii():  # the same as below, and three times as fast
        return text.encode().translate(_ASCII).decode().split()
    return _WORD.findall(text.lower())


def bands_of(threshold: float, permutations: int, most_missed: float = MOST_MISSED) -> tuple[int, int]:
    """Bands and values in a band: two documents are compared if all values of any band are equal.

    More values in a band mean fewer comparisons, and more pairs that are missed. Their number is the largest with which at most
    ``most_missed`` of the pairs at the threshold share no band.
    """
    rows = 1
    while rows < permutations and (1 - threshold ** (rows + 1)) ** (permutations // (rows + 1)) <= most_missed:
        rows += 1
    return permutations // rows, rows


def band_hashes(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """(bands, n) uint64: a hash of the values of each band of signatures (n, permutations)."""
    values = signatures[:, : bands * rows].reshape(len(signatures), bands, rows).astype(np.uint64)
    hashes = np.zeros(values.shape[:2], dtype=np.uint64)
    for row in range(rows):
        hashes = (hashes ^ values[:, :, row]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(32)
    return np.ascontiguousarray(hashes.T)


def _ngrams(found: list[str], ngram: int) -> list[str]:
    return list(map(" ".join, zip(*(islice(found, start, None) for start in range(ngram)), strict=False)))


def _rensa() -> ModuleType:
    return need("rensa", extra="clean", what="near_duplicates")

"""The words of a text, hashes of its word n-grams, and MinHash signatures.

For n-grams, a word is a run of letters, digits and combining marks, in lower case, after Unicode's compatibility
normalisation (NFKC). In scripts without spaces between words, such as Chinese, every character is a word. Punctuation and
spaces do not count.

Of two signatures, about as many values are equal as the sets of n-grams of both documents have in common (Jaccard).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import ModuleType

import numpy as np

from lit_llm.core.errors import need

# Thai, Lao, Tibetan; Myanmar; Khmer; kana and Bopomofo, and their extensions; Han in all planes.
UNSPACED = (
    (0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x312F), (0x31A0, 0x31FF), (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip
"""First and last code point of each block."""

_CLASS = "".join(f"{chr(first)}-{chr(last)}" for first, last in UNSPACED)
WORD_PATTERN = f"[{_CLASS}]|[^\\W{_CLASS}]+"
"""A word of a text in lower case, for near-duplicates: there an underscore is a letter, and a combining mark ends a word."""

_CHUNK = 2**16  # characters hashed at once, so that the arrays stay in the cache of a core
_LETTER, _ALONE = np.uint8(1), np.uint8(2)
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 2**64)
_MIX = np.array([0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93], dtype=np.uint64)  # odd

SEED = 1
MOST_MISSED = 0.02
"""Of pairs as similar as the threshold, at most this part shares no band, so that they are not compared."""
_SIGNED_TOGETHER = 2**20  # characters. N-grams across the ends of a chunk are left out, so that memory is bounded.
_WORD = re.compile(WORD_PATTERN)
_ASCII = bytes(b if chr(b).isalnum() or b == ord("_") else 32 for b in bytes(range(128)).lower()) + bytes(128)


def word_hashes(text: str) -> np.ndarray:
    """(words,) uint64: a hash of every word of ``text``, the same in every process."""
    text = unicodedata.normalize("NFKC", text).lower()
    return np.concatenate([np.empty(0, dtype=np.uint64), *(_hashes(part) for part in _parts(text))])


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """(max(0, words - n + 1),) uint64: a hash of every window of ``n`` words."""
    count = len(words) - n + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    for i in range(n):  # Horner's rule: the order of the words counts
        total *= _MIX[0]
        total += words[i : i + count]
    return _mixed(total)


def _parts(text: str) -> Iterator[str]:
    """``text`` in parts of about ``_CHUNK`` characters that end where a word does, or in one very long word."""
    start, kinds = 0, _kinds()
    while start < len(text):
        stop = start + _CHUNK
        while stop < min(len(text), start + 2 * _CHUNK) and kinds[ord(text[stop])] == _LETTER:
            stop += 1
        yield text[start:stop]
        start = stop


def _hashes(text: str) -> np.ndarray:
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    kinds = _kinds().take(codes)
    inside = kinds > 0
    # A word is a run of letters, or one character of a script without spaces.
    alone = kinds == _ALONE
    starts, ends = inside.copy(), inside.copy()
    starts[1:] &= ~inside[:-1] | alone[1:] | alone[:-1]
    ends[:-1] &= ~inside[1:] | alone[:-1] | alone[1:]
    first, last = np.flatnonzero(starts), np.flatnonzero(ends) + 1
    # The hash of a word is that of its letters at powers of the base, divided by the power of its first one.
    powers, inverses = _powers()
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * powers[: len(codes)], out=sums[1:])
    return _mixed((sums[last] - sums[first]) * inverses[first])


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Spread every bit over the whole hash. Arithmetic of uint64 wraps around, as intended."""
    hashes = hashes ^ (hashes >> np.uint64(31))
    hashes *= _MIX[1]
    hashes ^= hashes >> np.uint64(29)
    return hashes


@functools.cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Powers of the base and of its inverse, (2 * _CHUNK,) each."""
    powers, inverses = np.full((2, 2 * _CHUNK), 1, dtype=np.uint64)
    powers[1:], inverses[1:] = _BASE, _INVERSE
    return np.multiply.accumulate(powers), np.multiply.accumulate(inverses)


@functools.cache
def _kinds() -> np.ndarray:
    """(0x110000,) uint8: of every code point, whether it belongs to a word, or is one by itself."""
    kinds = np.zeros(0x110000, dtype=np.uint8)
    for code in range(0x110000):
        if unicodedata.category(chr(code))[0] in "LNM":
            kinds[code] = _LETTER
    for first, last in UNSPACED:
        block = kinds[first : last + 1]
        block[block > 0] = _ALONE
    return kinds


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
        for start in range(0, len(text), _SIGNED_TOGETHER):
            ngrams = _ngrams(words(text[start : start + _SIGNED_TOGETHER]), self._ngram)
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
    return need("rensa", what="near_duplicates")

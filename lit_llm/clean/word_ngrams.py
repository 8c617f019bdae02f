"""The words of a text, and hashes of its word n-grams.

For n-grams, a word is a run of letters, digits and combining marks, in lower case, after Unicode's compatibility
normalisation (NFKC). In scripts without spaces between words, such as Chinese, every character is a word. Punctuation and
spaces do not count.
"""

from __future__ import annotations

import re
import unicodedata

import numpy as np

# Thai, Lao, Tibetan; Myanmar; Khmer; kana and Bopomofo, and their extensions; Han in all planes.
UNSPACED = (
    (0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x312F), (0x31A0, 0x31FF), (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip
"""(first, last) code points of the Unicode blocks of scripts without spaces between words."""

_CLASS = "".join(f"{chr(first)}-{chr(last)}" for first, last in UNSPACED)
_WORD = re.compile(f"[{_CLASS}]|[^\\W{_CLASS}]+")
"""The pattern of a word in lower-case text, for `words`. An underscore counts as a letter, and a combining mark ends a word."""
_ASCII = bytes(b if chr(b).isalnum() or b == ord("_") else 32 for b in bytes(range(128)).lower()) + bytes(128)

_MIX = np.array([0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93], dtype=np.uint64)  # odd

SEED = 1
MOST_MISSED = 0.02
"""The largest share of the document pairs with a similarity equal to the threshold that may be missed, as no band is equal."""


class _Letters(dict[int, str]):
    """A table for `str.translate`: code point → a space if no word has the character; else the character, with spaces
    around it if its script has no spaces between words."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        if unicodedata.category(letter)[0] not in "LNM":
            letter = " "
        elif any(first <= code <= last for first, last in UNSPACED):
            letter = f" {letter} "
        self[code] = letter
        return letter


_LETTERS = _Letters()


def word_hashes(text: str) -> np.ndarray:
    """(words,) uint64: a hash of every word of ``text``. Equal words have equal hashes only within one process."""
    pieces = unicodedata.normalize("NFKC", text).lower().translate(_LETTERS).split()
    return np.fromiter(map(hash, pieces), np.int64, len(pieces)).view(np.uint64)


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """A hash of every window of ``n`` words: (max(0, w - n + 1),) uint64. ``words``: the hashes (w,) of the words."""
    count = len(words) - n + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    for i in range(n):  # Horner's rule: the order of the words counts
        total *= _MIX[0]
        total += words[i : i + count]
    # Spread every bit over the whole hash. Arithmetic of uint64 wraps around, as intended.
    total ^= total >> np.uint64(31)
    total *= _MIX[1]
    return total ^ (total >> np.uint64(29))


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation, for the search for near-duplicates."""
    if text.isascii():  # the same as below, and three times as fast
        return text.encode().translate(_ASCII).decode().split()
    return _WORD.findall(text.lower())


def bands_of(threshold: float, permutations: int, most_missed: float = MOST_MISSED) -> tuple[int, int]:
    """(number of bands, number of values in each band): how to cut a MinHash signature into bands to find similar documents.

    Two documents are compared if all values of any band are equal. More values in a band mean fewer comparisons, but more
    missed pairs. The number of values is the largest with which at most the share ``most_missed`` of the pairs with a
    similarity equal to ``threshold`` has no equal band. ``permutations``: the values of a signature, at most.
    """
    rows = 1
    while rows < permutations and (1 - threshold ** (rows + 1)) ** (permutations // (rows + 1)) <= most_missed:
        rows += 1
    return permutations // rows, rows

"""Equal documents: of those with the same hash, the first is kept."""

from __future__ import annotations

import hashlib
import re
import unicodedata

import numpy as np

_CHUNK = 2**20  # characters whose words are in memory at a time
_SPACE = re.compile(r"\s")


def whole_hash(text: str) -> bytes:
    """16 bytes that are equal for texts that differ in whitespace or in their Unicode form only."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    digest, start = hashlib.blake2b(digest_size=16), 0
    while start < len(text):
        space = _SPACE.search(text, start + _CHUNK)
        end = len(text) if space is None else space.end()
        words = text[start:end].split()
        digest.update(" ".join([*words, ""]).encode())
        start = end
    return digest.digest()


def first_of_each(hashes: np.ndarray) -> np.ndarray:
    """For each document, the number of the first with the same hash: its own if it is the first.

    Args:
        hashes: (n, 2) uint64, in the order of the documents.

    Returns:
        (n,) int64.
    """
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: equal hashes stay in the order of the documents
    ordered = hashes[order]
    starts = np.ones(len(order), dtype=bool)  # of runs of equal hashes
    starts[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    first = np.empty(len(order), dtype=np.int64)
    first[order] = order[starts][np.cumsum(starts) - 1]
    return first

"""Which of many documents have a hash: sorted hashes, behind a table that few others pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LARGEST_TABLE = 2**26  # bytes


class HashIndex:
    """The hashes of documents: 12 bytes each, and the table.

    Args:
        hashes: (n,) uint64, sorted. One of two documents is there twice.
        documents: (n,) int32: which document has each.
        table_per_hash: entries of the table, of which one of so many hashes hits by chance.
    """

    def __init__(self, hashes: np.ndarray, documents: np.ndarray, *, table_per_hash: int) -> None:
        self.hashes, self.documents = hashes, documents
        size = min(_LARGEST_TABLE, 1 << max(10, (len(hashes) * table_per_hash).bit_length()))
        self._mask = np.uint64(size - 1)
        self.table = np.zeros(size, dtype=bool)  # whether any hash has these low bits
        self.table[(hashes & self._mask).view(np.int64)] = True

    def known(self, hashes: np.ndarray) -> np.ndarray:
        """Those of ``hashes`` (n,) that a document has."""
        possible = hashes[self.table.take((hashes & self._mask).view(np.int64))]
        if not possible.size:
            return possible
        places = np.searchsorted(self.hashes, possible)
        places[places == len(self.hashes)] = 0
        return possible[self.hashes[places] == possible]

    def documents_with(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The documents (m,) that have one of ``hashes`` (n,), all different, and how many of them each has (m,)."""
        first, last = np.searchsorted(self.hashes, hashes), np.searchsorted(self.hashes, hashes, side="right")
        documents = [self.documents[a:b] for a, b in zip(first, last, strict=True)]
        return np.unique(np.concatenate([np.empty(0, np.int32), *documents]), return_counts=True)


def by_hash(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all documents, sorted, and the document of each. ``parts``: those of each document, uint64."""
    hashes = np.concatenate([np.empty(0, np.uint64), *parts])
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    order = np.argsort(hashes, kind="stable")
    return hashes[order], np.repeat(np.arange(len(parts), dtype=np.int32), sizes)[order]

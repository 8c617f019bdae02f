"""Find training documents that nearly repeat a held-out one.

A document is normalised (ASCII lower case, no whitespace) and cut into shingles: every window of
``SHINGLE_BYTES`` bytes. Of a held-out document, the ``SKETCH_HASHES`` smallest hashes of its shingles are kept, a random sample
of them (bottom-k sketch: Broder 1997). A training document is a near-duplicate if it contains at least ``THRESHOLD`` of the
sketch of one held-out document. That is containment, so a held-out text that is quoted in a longer one is found too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

SHINGLE_BYTES = 32  # about six words
SKETCH_HASHES = 64
THRESHOLD = 0.5

_MOST_HASHES = 2**21  # in an index: 24 MB
_FEWEST_HASHES = 8  # of a document
_TABLE_PER_HASH = 256  # entries of the first look-up table: one of so many shingles hits by chance
_LARGEST_TABLE = 2**26  # bytes
_CHUNK = 2**15  # bytes hashed at once, so that the arrays stay in the cache of a core
_LOWER = bytes(range(256)).lower()
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)  # odd


class Sketcher:
    """The sketch of one held-out document, which comes in pieces."""

    def __init__(self) -> None:
        self._shingles = _Shingles()
        self._smallest = np.empty(0, dtype=np.uint64)

    def add(self, piece: bytes) -> None:
        for hashes in self._shingles.of(piece):
            self._keep(hashes)

    def sketch(self) -> np.ndarray:
        """(k,) uint64, sorted, k <= ``SKETCH_HASHES``. Ends the document."""
        for hashes in self._shingles.rest():
            self._keep(hashes)
        return self._smallest

    def _keep(self, hashes: np.ndarray) -> None:
        if len(hashes) > 4 * SKETCH_HASHES:  # among the smallest are repeats
            hashes = np.partition(hashes, 4 * SKETCH_HASHES)[: 4 * SKETCH_HASHES]
        self._smallest = np.unique(np.concatenate([self._smallest, hashes]))[:SKETCH_HASHES]


class HeldOutIndex:
    """The sketches of all held-out documents.

    With more than 32,768 documents, fewer hashes of each are kept, at least 8, so that memory stays below 100 MB up to 262,144
    documents.

    Args:
        sketches: of ``Sketcher``.
    """

    def __init__(self, sketches: Sequence[np.ndarray]) -> None:
        kept = max(_FEWEST_HASHES, min(SKETCH_HASHES, _MOST_HASHES // max(len(sketches), 1)))
        sketches = [sketch[:kept] for sketch in sketches]
        hashes = np.concatenate([np.empty(0, np.uint64), *sketches])  # (n,)
        self.sizes = np.array([len(sketch) for sketch in sketches], dtype=np.int32)  # (documents,)
        order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[order]
        self.documents = np.repeat(np.arange(len(sketches), dtype=np.int32), self.sizes)[order]  # (n,)
        size = min(_LARGEST_TABLE, 1 << max(10, (len(hashes) * _TABLE_PER_HASH).bit_length()))
        self.mask = np.uint64(size - 1)
        self.table = np.zeros(size, dtype=bool)  # whether any hash has these low bits
        self.table[(self.hashes & self.mask).view(np.int64)] = True

    def identity(self) -> str:
        """A hash of the content."""
        return hashlib.blake2b(self.hashes.tobytes() + self.documents.tobytes(), digest_size=16).hexdigest()

    def checker(self) -> Checker:
        return Checker(self)


class Checker:
    """Compare one training document, which comes in pieces, with the held-out ones."""

    def __init__(self, index: HeldOutIndex) -> None:
        self._index = index
        self._shingles = _Shingles()
        self._found: list[np.ndarray] = []  # hashes that some held-out document has too

    def add(self, piece: bytes) -> None:
        for hashes in self._shingles.of(piece):
            self._look_up(hashes)

    @property
    def overlap(self) -> float:
        """The largest share of a held-out document's sketch that the document contains. Ends the document."""
        for hashes in self._shingles.rest():
            self._look_up(hashes)
        if not self._found:
            return 0.0
        index = self._index
        found = np.unique(np.concatenate(self._found))
        first, last = np.searchsorted(index.hashes, found), np.searchsorted(index.hashes, found, side="right")
        documents = np.concatenate([index.documents[a:b] for a, b in zip(first, last, strict=True)])
        named, counts = np.unique(documents, return_counts=True)
        return float((counts / index.sizes[named]).max())

    @property
    def duplicate(self) -> bool:
        return self.overlap >= THRESHOLD

    def _look_up(self, hashes: np.ndarray) -> None:
        index = self._index
        possible = hashes[index.table.take((hashes & index.mask).view(np.int64))]
        if possible.size:
            places = np.searchsorted(index.hashes, possible)
            places[places == len(index.hashes)] = 0
            found = possible[index.hashes[places] == possible]
            if found.size:
                self._found.append(found)


class _Shingles:
    """The hashes of the shingles of a document that comes in pieces."""

    def __init__(self) -> None:
        self._tail = b""  # normalised text whose shingles are not complete
        self._any = False  # whether a shingle was complete

    def of(self, piece: bytes) -> list[np.ndarray]:
        """The hashes (n,) uint64 that ``piece`` completes, in chunks."""
        text = self._tail + piece.translate(_LOWER, delete=b" \t\n\r\f\v")
        starts = range(0, len(text) - SHINGLE_BYTES + 1, _CHUNK)
        self._tail = text[max(0, len(text) - SHINGLE_BYTES + 1) :]
        self._any = self._any or len(text) >= SHINGLE_BYTES
        return [_hashes(text[start : start + _CHUNK + SHINGLE_BYTES - 1]) for start in starts]

    def rest(self) -> list[np.ndarray]:
        """Of a document shorter than a shingle, the hash of all of it; else nothing."""
        if self._any or not self._tail:
            return []
        self._any = True
        return [_hashes(self._tail.ljust(SHINGLE_BYTES, b"\0"))]


def _hashes(text: bytes) -> np.ndarray:
    """(n - SHINGLE_BYTES + 1,) uint64: a hash of every window of ``text``, which has n bytes."""
    words = np.empty(len(text) - 7, dtype=np.uint64)  # the eight bytes from each position on
    for shift in range(8):
        words[shift::8] = np.frombuffer(text, dtype="<u8", count=(len(text) - shift) // 8, offset=shift)
    # Hash windows of 8, then 16, then 32 bytes. Arithmetic of uint64 wraps around, as intended.
    words *= _FACTORS[0]
    words ^= words >> np.uint64(32)
    words = words[:-8] + words[8:] * _FACTORS[1]
    words ^= words >> np.uint64(29)
    words = words[:-16] + words[16:] * _FACTORS[2]
    words ^= words >> np.uint64(31)
    words *= _FACTORS[3]
    words ^= words >> np.uint64(32)
    return words

"""Find training documents that nearly repeat a held-out document.

A document is normalised (ASCII lower case, no whitespace) and cut into shingles: every window of ``SHINGLE_BYTES`` bytes. One
in ``SAMPLING`` shingles is compared: a shingle whose hash is below a fixed limit, in every document. The sketch of a held-out
document is its ``SKETCH_HASHES`` smallest hashes, a random sample of its shingles (bottom-k: Broder 1997).

A training document is a near-duplicate if it contains at least ``CONTAINED`` of a held-out document, and this text is at least
``SHARE`` of the training document. So a copy with some words changed is a near-duplicate, also inside a text up to five times
as long. A long document that only has a licence in common with a short document is not. Equal documents of any length are near-
duplicates. Results do not depend on the order of documents or on how documents are cut into pieces. The values were chosen
with ``benchmarks/near_duplicates.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

_LARGEST_TABLE = 2**26  # bytes

SHINGLE_BYTES = 16  # about three words
SAMPLING = 8
SKETCH_HASHES = 64
CONTAINED = 0.5
SHARE = 0.2
_MOST_HASHES = 2**21  # the most hashes in an index, as long as each document keeps 8: 24 MB
_FEWEST_HASHES = 8  # a document with fewer hashes is compared only as a whole
_TABLE_PER_HASH = 64  # entries of the look-up table for each hash: about one unknown shingle in 64 passes the table
_CHUNK = 2**15  # bytes hashed at once, so that the arrays stay in the cache of a core
_LOWER = bytes(range(256)).lower()
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93], dtype=np.uint64)  # odd
_SAMPLED = np.uint64(2**64 // SAMPLING)


class HashIndex:
    """An index that finds the documents that have given hashes. Memory: 12 bytes for each hash, and one byte for each entry of
    a look-up table, which rejects most unknown hashes before the slower search.

    Args:
        hashes: (n,) uint64, sorted. A hash that two documents have occurs twice.
        documents: (n,) int32: for each hash, the index of the document that has the hash.
        table_per_hash: entries of the look-up table for each hash. With k entries, one in k unknown hashes is not rejected.
    """

    def __init__(self, hashes: np.ndarray, documents: np.ndarray, *, table_per_hash: int) -> None:
        self.hashes, self.documents = hashes, documents
        size = min(_LARGEST_TABLE, 1 << max(10, (len(hashes) * table_per_hash).bit_length()))
        self._mask = np.uint64(size - 1)
        self.table = np.zeros(size, dtype=bool)  # whether any hash has these low bits
        self.table[(hashes & self._mask).view(np.int64)] = True

    def known(self, hashes: np.ndarray) -> np.ndarray:
        """The hashes (m,) among ``hashes`` (n,) that at least one document of the index has."""
        possible = hashes[self.table.take((hashes & self._mask).view(np.int64))]
        if not possible.size:
            return possible
        places = np.searchsorted(self.hashes, possible)
        places[places == len(self.hashes)] = 0
        return possible[self.hashes[places] == possible]

    def documents_with(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices (m,) of the documents that have any of the distinct ``hashes`` (n,), and how many of them each has (m,)."""
        first, last = np.searchsorted(self.hashes, hashes), np.searchsorted(self.hashes, hashes, side="right")
        documents = [self.documents[a:b] for a, b in zip(first, last, strict=True)]
        return np.unique(np.concatenate([np.empty(0, np.int32), *documents]), return_counts=True)


def by_hash(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all documents, sorted, (n,), and for each hash the index of its document (n,). ``parts``: a uint64 array of
    hashes for each document."""
    hashes = np.concatenate([np.empty(0, np.uint64), *parts])
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    order = np.argsort(hashes, kind="stable")
    return hashes[order], np.repeat(np.arange(len(parts), dtype=np.int32), sizes)[order]


class Sketcher:
    """Computes the sketch (a sample of hashes) of one held-out document, whose pieces are added one after the other."""

    def __init__(self) -> None:
        self._text = _Text()
        self._smallest = np.empty(0, dtype=np.uint64)

    def add(self, piece: bytes) -> None:
        for hashes in self._text.add(piece):
            if len(self._smallest) == SKETCH_HASHES:
                hashes = hashes[hashes < self._smallest[-1]]
            self._smallest = np.unique(np.concatenate([self._smallest, hashes]))[:SKETCH_HASHES]

    def sketch(self) -> np.ndarray:
        """The sketch of the document, (2 + k,) uint64: size in bytes and hash of the normalised text, and the k smallest hashes
        of shingles, sorted; k is at most ``SKETCH_HASHES``."""
        return np.concatenate([np.array([self._text.size, self._text.whole()], dtype=np.uint64), self._smallest])


class HeldOutIndex(HashIndex):
    """An index of the sketches of all held-out documents.

    With more than 32,768 documents, the index has fewer than ``SKETCH_HASHES`` hashes of each document, but at least 8. A
    document with 8 hashes takes 112 bytes.

    Args:
        sketches: the results of ``Sketcher.sketch`` for the documents.
    """

    def __init__(self, sketches: Sequence[np.ndarray]) -> None:
        kept = max(_FEWEST_HASHES, min(SKETCH_HASHES, _MOST_HASHES // max(len(sketches), 1)))
        heads = np.array([sketch[:2] for sketch in sketches], dtype=np.uint64).reshape(-1, 2)
        self.sizes = heads[:, 0].astype(np.float64)  # (documents,) bytes
        self.wholes = np.unique(heads[:, 1])
        shingled = [len(sketch) >= 2 + _FEWEST_HASHES for sketch in sketches]
        parts = [sketch[2 : 2 + kept] if is_kept else sketch[:0] for sketch, is_kept in zip(sketches, shingled, strict=True)]
        self.counts = np.array([len(part) for part in parts], dtype=np.int32)  # (documents,) hashes
        super().__init__(*by_hash(parts), table_per_hash=_TABLE_PER_HASH)

    def identity(self) -> str:
        """A hash of the index's content, for cache keys."""
        content = hashlib.blake2b(digest_size=16)
        for array in (self.sizes, self.wholes, self.hashes, self.documents):
            content.update(array.tobytes())
        return content.hexdigest()


class Checker:
    """Compares one training document, whose pieces are added one after the other, with the held-out documents."""

    def __init__(self, index: HeldOutIndex) -> None:
        self._index = index
        self._text = _Text()
        self._hashes: list[np.ndarray] = []  # hashes that some held-out document has too

    def add(self, piece: bytes) -> None:
        for hashes in self._text.add(piece):
            known_hashes = self._index.known(hashes)
            if known_hashes.size:
                self._hashes.append(known_hashes)

    @property
    def equal(self) -> bool:
        """Whether the normalised text of the document equals that of a held-out document."""
        whole, wholes = np.uint64(self._text.whole()), self._index.wholes
        place = int(np.searchsorted(wholes, whole))
        return bool(self._text.size and place < len(wholes) and wholes[place] == whole)

    def contained(self) -> tuple[np.ndarray, np.ndarray]:
        """The indices (m,) of the held-out documents that have hashes in common with the training document, and for each (m,)
        the share, from 0 to 1, of this held-out document's hashes that the training document has."""
        index = self._index
        hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *self._hashes]))
        named, counts = index.documents_with(hashes)
        return named, counts / index.counts[named]

    @property
    def duplicate(self) -> bool:
        """Whether the training document nearly repeats a held-out document; the module's docstring defines the rule."""
        if self.equal:
            return True
        named, parts = self.contained()
        common = parts * self._index.sizes[named]  # bytes
        return bool(np.any((parts >= CONTAINED) & (common >= SHARE * self._text.size)))


class _Text:
    """Normalises a document that comes in pieces. Gives its size, its hash, and hashes of a sample of its shingles: windows of
    ``SHINGLE_BYTES`` bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._tail = b""  # the last bytes of the text so far, with which incomplete shingles start
        self._whole = hashlib.blake2b(digest_size=8)

    def add(self, piece: bytes) -> Iterator[np.ndarray]:
        """Add ``piece`` to the text. Yield, in arrays (n,) uint64, the sampled hashes of the shingles that end in ``piece``."""
        added = piece.translate(_LOWER, delete=b" \t\n\r\f\v")
        self.size += len(added)
        self._whole.update(added)
        text = self._tail + added
        self._tail = text[max(0, len(text) - SHINGLE_BYTES + 1) :]
        for start in range(0, len(text) - SHINGLE_BYTES + 1, _CHUNK):
            hashes = _hashes(text[start : start + _CHUNK + SHINGLE_BYTES - 1])
            yield hashes[hashes < _SAMPLED]

    def whole(self) -> int:
        return int.from_bytes(self._whole.digest(), "little")


def _hashes(text: bytes) -> np.ndarray:
    """(n - SHINGLE_BYTES + 1,) uint64: a hash of every window of ``SHINGLE_BYTES`` bytes in ``text``, which has n bytes."""
    words = np.empty(len(text) - 7, dtype=np.uint64)  # the eight bytes from each position on
    for shift in range(8):
        words[shift::8] = np.frombuffer(text, dtype="<u8", count=(len(text) - shift) // 8, offset=shift)
    # Hash windows of 8, then of 16 bytes. Arithmetic of uint64 wraps around, as intended.
    words *= _FACTORS[0]
    words ^= words >> np.uint64(32)
    words = words[:-8] + words[8:] * _FACTORS[1]
    words ^= words >> np.uint64(29)
    words *= _FACTORS[2]
    words ^= words >> np.uint64(32)
    return words

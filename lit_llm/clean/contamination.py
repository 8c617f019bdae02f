"""Remove documents that contain word n-grams of reference documents: a validation or test set.

An n-gram of 13 words was chosen for GPT-3 (Brown et al. 2020, appendix C), and any common one counted. A reference document
with fewer words than an n-gram, but at least ``SHORTEST``, counts if all its words follow each other in a document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from lit_llm.clean.clean_settings import SHORTEST
from lit_llm.clean.rules import Document, Removed
from lit_llm.clean.word_ngrams import ngram_hashes, word_hashes
from lit_llm.ingest.hash_index import HashIndex, by_hash
from lit_llm.ingest.token_parts import part_file

_TABLE_PER_HASH = 16  # entries of a first look-up table: few n-grams that are not there pass it


@dataclass(eq=False)
class ReferenceIndex(HashIndex):
    """The n-grams of all reference documents: 12 bytes each, and a table of up to 64 MB."""

    counts: np.ndarray
    """(documents,) int64: different n-grams of each document."""
    files: np.ndarray
    """(files,) str: where they are from."""
    places: np.ndarray
    """(documents, 2) int64: of each, its file among ``files`` and its number in it."""
    hashes: np.ndarray
    """(n-grams,) uint64, sorted. An n-gram of two documents is there twice."""
    documents: np.ndarray
    """(n-grams,) int32: which document has each."""
    lengths: np.ndarray
    """Words in an n-gram: ``n``, and those of shorter documents."""
    too_short: int
    """How many documents have fewer than ``SHORTEST`` words. They cannot be found."""

    def __post_init__(self) -> None:
        super().__init__(self.hashes, self.documents, table_per_hash=_TABLE_PER_HASH)

    @classmethod
    def of_documents(cls, references: Iterable[Document], *, n: int) -> ReferenceIndex:
        """The n-grams of ``n`` words, at least ``SHORTEST``."""
        too_short = 0
        places, lengths, parts = [], set(), []
        files: dict[str, int] = {}
        for reference in references:
            words = word_hashes(reference.text)
            length = min(n, len(words))
            if length < SHORTEST:
                too_short += 1
                continue
            file, _, number = reference.source.rpartition(":")
            places.append((files.setdefault(file, len(files)), int(number)))
            lengths.add(length)
            parts.append(np.unique(ngram_hashes(words, length)))
        hashes, documents = by_hash(parts)
        return cls(
            counts=np.array([len(part) for part in parts], dtype=np.int64),
            files=np.array(list(files), dtype=np.str_),
            places=np.array(places, dtype=np.int64).reshape(-1, 2),
            hashes=hashes,
            documents=documents,
            lengths=np.array(sorted(lengths), dtype=np.int64),
            too_short=too_short,
        )

    def save(self, path: Path) -> None:
        """Write a file for ``load``, complete or not at all."""
        with part_file(path) as file:
            np.savez(file, **{one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def load(cls, path: Path) -> ReferenceIndex:
        with np.load(path) as arrays:
            return cls(**{**arrays, "too_short": int(arrays["too_short"])})

    def identity(self) -> str:
        """A hash of the content."""
        content = (self.hashes, self.documents, self.files, self.places)
        return hashlib.blake2b(b"".join(array.tobytes() for array in content), digest_size=16).hexdigest()

    def source(self, document: int) -> str:
        """The file of a reference document, a colon, and its number in it."""
        file, number = self.places[document].tolist()
        return f"{self.files[file]}:{number}"

    def found(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Reference documents (m,) that have an n-gram of ``text``, and how many different ones of each (m,)."""
        words = word_hashes(text)
        common = [np.unique(self.known(ngram_hashes(words, n))) for n in self.lengths.tolist()]
        return self.documents_with(np.concatenate([np.empty(0, np.uint64), *common]))


class Contamination:
    """A rule that removes documents with text of a reference document.

    Args:
        share: the smallest part of a reference document's n-grams, between 0 and 1. 0: a single one.
    """

    def __init__(self, index: ReferenceIndex, *, share: float) -> None:
        self._index, self._share = index, share

    def __call__(self, text: str) -> str | Removed:
        documents, found = self._index.found(text)
        shares = found / self._index.counts[documents]
        if not shares.size or shares.max() < self._share:
            return text
        most = int(np.argmax(shares))
        source = self._index.source(int(documents[most]))
        return Removed("against/ngrams", f"{shares[most]:.1%} of the n-grams of {source}")

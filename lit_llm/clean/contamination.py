"""Remove documents that contain word n-grams of reference documents: a validation or test set.

An n-gram of 13 words was chosen for GPT-3 (Brown et al. 2020, appendix C), and any common one counted. A reference document
with fewer words than an n-gram, but at least ``SHORTEST``, counts if all its words follow each other in a document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from lit_llm.clean.clean_settings import SHORTEST
from lit_llm.clean.rules import Document, Removed, documents_of
from lit_llm.clean.word_ngrams import ngram_hashes, word_hashes
from lit_llm.core.errors import UserError, refuse
from lit_llm.ingest.near_duplicates import HashIndex, by_hash
from lit_llm.ingest.paths import list_sources
from lit_llm.ingest.readers import DocumentReader, ReadSettings
from lit_llm.ingest.shard_manifest import META_FILE, Manifest
from lit_llm.ingest.shards import DOCS_DTYPE, DOCS_SUFFIX, HEADER_BYTES, LAYOUTS, magic_for
from lit_llm.ingest.token_parts import part_file
from lit_llm.tokenizers import load_tokenizer

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


class References:
    """Reference documents. Nothing is read until they are iterated over.

    Args:
        paths: files, folders, globs or URLs; or a folder that prepare wrote, of which val and test are read.
        text_key: the key or column of the text, of files that have keys.

    Raises:
        UserError: Nothing matches, or a prepared folder holds no held-out text. One sentence a line.
    """

    def __init__(self, paths: Sequence[str], *, text_key: str) -> None:
        prepared = [Path(path) for path in paths if (Path(path) / META_FILE).is_file()]
        files = [path for path in paths if Path(path) not in prepared]
        self._sources, problems = list_sources(files, flag="--against") if files else ([], [])
        self._held_out: list[tuple[Path, str, Manifest]] = []
        for folder in prepared:
            manifest = Manifest.read(folder)
            if manifest is None:
                problems.append(
                    f"{folder} has a {META_FILE} that prepare did not write: prepare it again, or give text files (--against)."
                )
                continue
            splits = [name for name in ("val", "test") if name in manifest.splits and manifest.splits[name].tokens]
            if not splits:
                problems.append(f"{folder} has neither val nor test: nothing in it is held out (--against).")
            self._held_out += [(folder, name, manifest) for name in splits]
        refuse(problems)
        self._settings = ReadSettings(text_key=text_key)

    def identity(self) -> list[str]:
        """Differs if the documents can differ."""
        files = [f"{source.path} {source.size} {source.version} {self._settings.text_key}" for source in self._sources]
        return files + [f"{name} {manifest.splits[name].tokens_blake2b}" for _, name, manifest in self._held_out]

    def __iter__(self) -> Iterator[Document]:
        for source in self._sources:
            with DocumentReader(source, self._settings) as reader:
                yield from documents_of(reader, name=source.name)
        for folder, split, manifest in self._held_out:
            for number, text in enumerate(_decoded(folder, split, manifest), start=1):
                yield Document(text, f"{folder / split}:{number}")


def _decoded(folder: Path, split: str, manifest: Manifest) -> Iterator[str]:
    """The documents of a split as text. A document may continue in the next shard."""
    tokenizer = load_tokenizer(folder)
    _, dtype = LAYOUTS[magic_for(manifest.vocab_size)]
    marks = [mark for mark in (manifest.bos_id, manifest.eos_id) if mark is not None]
    begun = np.empty(0, dtype=dtype)
    for shard in manifest.splits[split].shards:
        file = folder / shard.file
        ends_file = file.with_suffix(DOCS_SUFFIX)
        if not file.is_file() or not ends_file.is_file():
            missing = ends_file if file.is_file() else file
            raise UserError(f"{missing} is missing: prepare {folder} again, or give text files (--against).")
        tokens = np.fromfile(file, dtype=dtype, offset=HEADER_BYTES)
        parts = np.split(tokens, np.fromfile(ends_file, dtype=DOCS_DTYPE).astype(np.int64))
        parts[0] = np.concatenate([begun, parts[0]])
        *whole, begun = parts
        for ids in whole:
            yield tokenizer.decode(ids[~np.isin(ids, marks)])
    if begun.size:
        yield tokenizer.decode(begun[~np.isin(begun, marks)])

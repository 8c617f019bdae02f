"""Remove documents that contain word n-grams of reference documents, such as the documents of a validation or test set.

GPT-3 used n-grams of 13 words and removed a document for a single common n-gram (Brown et al. 2020, appendix C). A reference
document with fewer than n words, but at least ``SHORTEST``, counts as a single n-gram of all its words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from lit_llm.tokenizers import load_tokenizer

_TABLE_PER_HASH = 16  # entries of the look-up table for each hash: about one unknown n-gram in 16 passes the table


class ReferenceIndex(HashIndex):
    """An index of the hashes of all n-grams of the reference documents. Memory: 12 bytes for each hash, and up to 64 MB.

    Args:
        n: words in an n-gram, at least ``SHORTEST``. A reference document with fewer words is one n-gram.
    """

    def __init__(self, references: Iterable[Document], *, n: int) -> None:
        self.too_short = 0  # the number of documents with fewer than ``SHORTEST`` words, which are not in the index
        self.sources: list[str] = []  # the names of the documents in the index
        lengths, parts = set(), []
        for reference in references:
            words = word_hashes(reference.text)
            length = min(n, len(words))
            if length < SHORTEST:
                self.too_short += 1
                continue
            self.sources.append(reference.source)
            lengths.add(length)
            parts.append(np.unique(ngram_hashes(words, length)))
        super().__init__(*by_hash(parts), table_per_hash=_TABLE_PER_HASH)
        self.lengths = sorted(lengths)
        self.counts = np.array([len(part) for part in parts], dtype=np.int64)  # (documents,) different n-grams

    def matches(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The indices (m,) of the reference documents that have n-grams in common with ``text``, and how many different n-grams
        each of these documents has in common with ``text`` (m,)."""
        words = word_hashes(text)
        common = [np.unique(self.known(ngram_hashes(words, n))) for n in self.lengths]
        return self.documents_with(np.concatenate([np.empty(0, np.uint64), *common]))


class Contamination:
    """A rule that removes documents with n-grams of a reference document.

    Args:
        index: the n-grams of the reference documents.
        share: a document is removed if it has at least this share of a reference document's n-grams. 0: one n-gram is enough.
    """

    def __init__(self, index: ReferenceIndex, *, share: float) -> None:
        self._index, self._share = index, share

    def __call__(self, text: str) -> str | Removed:
        documents, counts = self._index.matches(text)
        shares = counts / self._index.counts[documents]
        if not shares.size or shares.max() < self._share:
            return text
        most = int(np.argmax(shares))
        source = self._index.sources[documents[most]]
        return Removed("against/ngrams", f"{shares[most]:.1%} of the n-grams of {source}")


class References:
    """An iterable of the reference documents. Iteration reads the documents from the files.

    Args:
        paths: files, folders, globs or URLs. Of a folder that prepare wrote, the splits val and test are read.
        text_key: the key or column of the text, in files that have keys.

    Raises:
        UserError: A path matches no file, or a prepared folder has neither val nor test: one line for each such path.
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

    def __iter__(self) -> Iterator[Document]:
        for source in self._sources:
            with DocumentReader(source, self._settings) as reader:
                yield from documents_of(reader, name=source.name)
        for folder, split, manifest in self._held_out:
            for number, text in enumerate(_decoded(folder, split, manifest), start=1):
                yield Document(text, f"{folder / split}:{number}")


def _decoded(folder: Path, split: str, manifest: Manifest) -> Iterator[str]:
    """Yield the documents of a split of a folder that prepare wrote, decoded to text, without BOS and EOS.

    Raises:
        UserError: A shard or its file of document ends is missing.
    """
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

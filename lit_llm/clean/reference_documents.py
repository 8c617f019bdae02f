"""The documents that training data must not contain: of files, or of the held-out splits of a prepared folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lit_llm.clean.rules import Document, documents_of
from lit_llm.core.errors import UserError
from lit_llm.ingest.listing import list_sources
from lit_llm.ingest.readers import DocumentReader, ReadSettings
from lit_llm.ingest.shard_manifest import META_FILE, Manifest
from lit_llm.ingest.shards import DOCS_DTYPE, DOCS_SUFFIX, HEADER_BYTES, LAYOUTS, magic_for
from lit_llm.ingest.source import Source
from lit_llm.tokenizers import load_tokenizer

_HELD_OUT = ("val", "test")


class References:
    """Reference documents. Nothing is read until they are iterated over.

    Args:
        paths: files, folders, globs or URLs; or a folder that prepare wrote, of which val and test are read.
        text_key: the key or column of the text, of files that have keys.

    Raises:
        UserError: Nothing matches, or a prepared folder holds no held-out text. One sentence a line.
    """

    def __init__(self, paths: Sequence[str], *, text_key: str) -> None:
        self._prepared = [Path(path) for path in paths if (Path(path) / META_FILE).is_file()]
        files = [path for path in paths if Path(path) not in self._prepared]
        self._sources: list[Source] = []
        problems: list[str] = []
        if files:
            self._sources, problems = list_sources(files, flag="--against")
        for folder in self._prepared:
            problems += (
                [] if _held_out(folder) else [f"{folder} has neither val nor test: nothing in it is held out (--against)."]
            )
        if problems:
            raise UserError("\n".join(problems))
        self._settings = ReadSettings(text_key=text_key)

    def identity(self) -> list[str]:
        """Differs if the documents can differ."""
        files = [f"{source.path} {source.size} {source.version} {self._settings.text_key}" for source in self._sources]
        splits = [(folder, name) for folder in self._prepared for name in _held_out(folder)]
        return files + [f"{name} {_manifest(folder).splits[name].tokens_blake2b}" for folder, name in splits]

    def __iter__(self) -> Iterator[Document]:
        for source in self._sources:
            with DocumentReader(source, self._settings) as reader:
                yield from documents_of(reader, name=source.name)
        for folder in self._prepared:
            for split in _held_out(folder):
                for number, text in enumerate(_decoded(folder, split), start=1):
                    yield Document(text, f"{folder / split}:{number}")


def _manifest(folder: Path) -> Manifest:
    manifest = Manifest.read(folder)
    if manifest is None:
        raise UserError(
            f"{folder} has a {META_FILE} that prepare did not write: prepare it again, or give text files (--against)."
        )
    return manifest


def _held_out(folder: Path) -> list[str]:
    splits = _manifest(folder).splits
    return [name for name in _HELD_OUT if name in splits and splits[name].tokens]


def _decoded(folder: Path, split: str) -> Iterator[str]:
    """The documents of a split as text. A document may continue in the next shard."""
    manifest = _manifest(folder)
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

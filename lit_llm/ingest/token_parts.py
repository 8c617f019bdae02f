"""A part, the stored result of one job of tokenisation: the tokens and document ends of each split, and counts.

A part consists of the files ``<key>.<split>.bin`` (ids, little-endian, 2 or 4 bytes each) and ``<key>.<split>.docs`` (document
ends as uint64, in tokens from the start of the file), and, if only some tokens are targets, ``<key>.<split>.mask`` (a byte for
each token). ``<key>.json`` is written last, so a part with this file is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lit_llm.core.disk import complete_file, delete, naming, read_json, write_text
from lit_llm.ingest.selection import SelectedPiece
from lit_llm.ingest.shard_manifest import SplitInfo, from_json
from lit_llm.ingest.shards import DOCS_SUFFIX, LAYOUTS, MASK_SUFFIX, magic_for

PARTS = "parts"
"""The name of the folder of the parts, below the folder of the shards. It is deleted when the shards are complete."""

_FLUSH_TOKENS = 2**18  # the number of tokens that are written at a time
_READ_TOKENS = 2**22
_READ_ENDS = 2**16


def start_parts(out: Path) -> Path:
    """Make the folder of the parts in ``out``, and return its path. Finished parts stay; other files in ``out`` are deleted."""
    parts = out / PARTS
    parts.mkdir(exist_ok=True)
    for leftover in (*parts.glob("*.tmp"), *(path for path in out.iterdir() if path != parts)):
        delete(leftover)
    return parts


def part_file(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """Open a temporary file for writing, which gets the name ``path`` when the ``with`` block ends. A killed process leaves the
    temporary file, which `start_parts` deletes."""
    return complete_file(path, path.with_name(f"{path.name}.{os.getpid()}.tmp"))  # each process has its own file name


@dataclass
class PartCounts:
    """Record of the counts of one split of a part, or of the sum over several parts."""

    documents: int = 0
    bytes: int = 0
    """The number of UTF-8 bytes of the text."""
    tokens: int = 0
    unknown_tokens: int = 0
    """The number of tokens that stand for characters outside the vocabulary."""
    token_bytes: int = 0
    """The sum of ``Tokenizer.token_bytes`` over all tokens but unknown ones. Not ``bytes`` if the tokenizer changes text."""

    def add(self, other: PartCounts | SplitInfo) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass
class Part:
    """Record of the counts of a finished job of tokenisation, or of the sum over several jobs."""

    splits: dict[str, PartCounts] = field(default_factory=dict)
    skipped: int = 0
    """The number of documents without text."""
    near_duplicates: int = 0
    """The number of training documents that are left out because they nearly repeat held-out text."""
    invalid: list[str] = field(default_factory=list)
    """Paths of the sources that have bytes which are not UTF-8."""
    masked: bool = False
    """Whether the part has masks, which say which tokens are targets."""
    pairs: int = 0
    """The number of preference pairs. A pair is two documents, one with the chosen and one with the rejected answer."""

    def add(self, other: Part) -> None:
        """Add the counts of the part ``other`` to the counts of this part, in place. Lists of sources are joined."""
        for name, counts in other.splits.items():
            self.splits.setdefault(name, PartCounts()).add(counts)
        self.skipped += other.skipped
        self.near_duplicates += other.near_duplicates
        self.invalid += other.invalid
        self.pairs += other.pairs

    @classmethod
    def read(cls, folder: Path, key: str) -> Part | None:
        """The counts of the job ``key``, read from its file in ``folder``; None if the job is not finished."""
        try:
            part: Part = from_json(cls, read_json(folder / f"{key}.json"))
        except FileNotFoundError:
            return None
        files = [file for name in part.splits for file in _files_of(folder / f"{key}.{name}", part.masked)]
        return part if all(file.is_file() for file in files) else None  # a killed process may have begun to delete

    def write(self, folder: Path, key: str) -> None:
        write_text(folder / f"{key}.json", json.dumps(asdict(self)))


def _files_of(path: Path, masked: bool) -> list[Path]:
    """The paths of the files of one split of a part: ids, document ends and, if ``masked``, the mask."""
    return [path.with_name(path.name + suffix) for suffix in (".bin", DOCS_SUFFIX, MASK_SUFFIX)[: 3 if masked else 2]]


def token_type(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The numpy dtype of token ids on disk, in parts and shards: uint16 up to 65,536 ids, uint32 above."""
    return LAYOUTS[magic_for(vocab_size)][1]


class PartWriter:
    """Writes the documents of one split of a part. A document that turns out to repeat held-out text is removed again.

    Args:
        path: the path of the part's files without their suffixes.
        stack: opens the files, which get their names when the stack is closed without an exception.
        document_ids: the BOS and the EOS id around every document; None: no id.
        masked: whether masks are written. If so, every call of ``append`` has a mask, and no document is removed.
    """

    def __init__(
        self,
        path: Path,
        stack: contextlib.ExitStack,
        dtype: np.dtype[np.unsignedinteger],
        document_ids: tuple[int | None, int | None],
        *,
        masked: bool = False,
    ) -> None:
        self.counts = PartCounts()
        self.dropped = 0
        """The number of documents that were removed because they repeat held-out text."""
        self._path, self._dtype = path, dtype
        self._bos, self._eos = (np.array([] if one is None else [one], dtype=np.int64) for one in document_ids)
        self._files = [stack.enter_context(part_file(file)) for file in _files_of(path, masked)]
        self._ids: list[np.ndarray] = []  # the ids that are not written yet
        self._masks: list[np.ndarray] = []  # the masks of these ids, if there are masks
        self._ends: list[int] = []
        self._tokens = 0  # the number of appended tokens, written or not
        self._start = 0  # the position of the first token of the present document
        self._document = PartCounts()  # the counts of the present document

    def append(self, piece: SelectedPiece, ids: np.ndarray, mask: np.ndarray | None, counts: PartCounts) -> None:
        """Append a piece of a document. The BOS id goes before the first piece of a document, the EOS id after the last piece.

        Args:
            ids: (n,) the ids of the piece.
            mask: (n,) uint8, 1 for targets; None without masks.
            counts: the bytes and unknown tokens of the piece's text.
        """
        if piece.first:
            self._start, self._document = self._tokens, PartCounts()
            self._add(self._bos)
        self._add(ids)
        if mask is not None:
            self._masks.append(mask)
        self._document.add(counts)
        if piece.last and piece.repeats_held_out:
            self._drop()
        elif piece.last:
            self._add(self._eos)
            self._ends.append(self._tokens)
            self.counts.add(self._document)
            self.counts.documents += 1
        if self._tokens - self.counts.tokens >= _FLUSH_TOKENS:
            self.flush()

    def _add(self, ids: np.ndarray) -> None:
        self._ids.append(ids.astype(self._dtype, copy=False))
        self._tokens += len(ids)

    def _drop(self) -> None:
        """Remove the ids of the present document from the file."""
        self.flush()
        tokens = self._files[0]
        tokens.seek(self._start * self._dtype.itemsize)
        tokens.truncate()
        self._tokens = self.counts.tokens = self._start
        self.dropped += 1

    def flush(self) -> None:
        """Write the ids, document ends and masks that were appended but not written yet."""
        ends = np.array(self._ends, dtype="<u8")
        with naming(self._path):
            for file, arrays in zip(self._files, (self._ids, [ends], self._masks), strict=False):
                for array in arrays:
                    file.write(array.tobytes())
        self.counts.tokens = self._tokens
        self._ids, self._masks, self._ends = [], [], []


def read_part(
    path: Path, dtype: np.dtype[np.unsignedinteger], *, masked: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray | None, bool]]:
    """Yield runs of tokens of a part: ids (n,), their mask (n,) uint8 or None, and whether a document ends after the run.

    ``dtype`` and ``masked`` must be the same as when the part was written.

    Args:
        path: the path of the part's files without their suffixes.
    """
    with contextlib.ExitStack() as opened:
        file, ends, *masks = (opened.enter_context(open(one, "rb")) for one in _files_of(path, masked))
        position = 0
        # Not np.fromfile: it turns a Ctrl-C into a TypeError.
        while (some := np.frombuffer(ends.read(8 * _READ_ENDS), dtype="<u8")).size:
            for end in some.tolist():
                while position < end:
                    ids = np.frombuffer(file.read(dtype.itemsize * min(end - position, _READ_TOKENS)), dtype=dtype)
                    assert ids.size, f"{path} is shorter than its document ends say"
                    position += ids.size
                    mask = np.frombuffer(masks[0].read(ids.size), dtype=np.uint8) if masks else None
                    yield ids, mask, position == end

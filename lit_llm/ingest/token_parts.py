"""The result of one job: the tokens of each split, document ends, and counts.

A part is ``<key>.<split>.bin`` (ids, little-endian, 2 or 4 bytes each) and ``<key>.<split>.docs`` (uint64, ends in tokens from
the part's start), and, if only some tokens are targets, ``<key>.<split>.mask`` (a byte for each token). ``<key>.json`` is
written last, so a part that has one is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

from lit_llm.core.disk import delete, naming, new_file, read_json, write_text
from lit_llm.ingest.shards import DOCS_SUFFIX, LAYOUTS, MASK_SUFFIX, magic_for

PARTS = "parts"
"""The folder of the parts, in that of the shards. It is deleted when the shards are complete."""

_READ_TOKENS = 2**22
_READ_ENDS = 2**16


def start_parts(folder: Path) -> None:
    """Make the folder of parts. Files that a killed process did not finish are deleted."""
    folder.mkdir(exist_ok=True)
    for leftover in folder.glob("*.tmp"):
        delete(leftover)


def unfinished(path: Path) -> Path:
    """What a file of a part is called until it is complete: of another process, another name."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


@dataclass
class PartCounts:
    """What one split of a part holds, or the sum of several."""

    documents: int = 0
    bytes: int = 0
    """UTF-8 bytes of the text."""
    tokens: int = 0
    unknown_tokens: int = 0
    """Tokens that stand for a character outside the vocabulary."""
    token_bytes: int = 0
    """What the other tokens have by ``Tokenizer.token_bytes``, which does not know what was put before or changed in a text."""

    def add(self, other: PartCounts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Part:
    """What is known about a finished job."""

    splits: dict[str, PartCounts] = field(default_factory=dict)
    skipped: int = 0
    """Documents without text."""
    near_duplicates: int = 0
    """Documents left out of training because they nearly repeat held-out text."""
    invalid: list[str] = field(default_factory=list)
    """Sources with bytes that are not UTF-8."""
    masked: bool = False
    """Whether only some tokens are targets, which the masks tell."""

    @classmethod
    def read(cls, folder: Path, key: str) -> Part | None:
        """The finished job ``key``; None if it is not finished."""
        try:
            content = read_json(folder / f"{key}.json")
        except FileNotFoundError:
            return None
        splits = {name: PartCounts(**counts) for name, counts in content.pop("splits").items()}
        part = cls(splits, **content)
        suffixes = (".bin", DOCS_SUFFIX, MASK_SUFFIX) if part.masked else (".bin", DOCS_SUFFIX)
        files = [folder / f"{key}.{name}{suffix}" for name in splits for suffix in suffixes]
        return part if all(file.is_file() for file in files) else None  # a killed process may have begun to delete

    def write(self, folder: Path, key: str) -> None:
        write_text(folder / f"{key}.json", json.dumps(asdict(self)))


def token_type(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The type of ids on disk."""
    return LAYOUTS[magic_for(vocab_size)][1]


class PartWriter:
    """Write the tokens and document ends of one split of a part. After an exception, `start_parts` removes the files.

    Args:
        path: without suffix.
        masked: every ``write`` says which ids are targets.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger], *, masked: bool = False) -> None:
        self.counts = PartCounts()
        self._path, self._dtype = path, dtype
        suffixes = (".bin", DOCS_SUFFIX, MASK_SUFFIX) if masked else (".bin", DOCS_SUFFIX)
        self._targets = {suffix: path.with_name(path.name + suffix) for suffix in suffixes}
        self._files = {suffix: new_file(unfinished(target)) for suffix, target in self._targets.items()}  # closed by __exit__
        self._tokens, self._ends = self._files[".bin"], self._files[DOCS_SUFFIX]

    def write(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append ids (n,) of the current document, and which of them are targets, (n,) uint8."""
        with naming(self._path):
            self._tokens.write(ids.astype(self._dtype, copy=False).tobytes())
            if mask is not None:
                self._files[MASK_SUFFIX].write(mask.tobytes())
        self.counts.tokens += len(ids)

    def end_documents(self, ends: np.ndarray) -> None:
        """Record the ends (n,) of documents, in tokens from the start of the part."""
        with naming(self._path):
            self._ends.write(ends.astype("<u8").tobytes())
        self.counts.documents += len(ends)

    def drop_from(self, token: int) -> None:
        """Take back every token from number ``token`` on. Not for parts with masks."""
        self._tokens.flush()
        self._tokens.seek(token * self._dtype.itemsize)
        self._tokens.truncate()
        self.counts.tokens = token

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                with naming(self._path):
                    for file in self._files.values():
                        file.flush()
                        os.fsync(file.fileno())
        finally:
            for file in self._files.values():
                with contextlib.suppress(OSError):  # a full disk refuses the rest of the buffer too
                    file.close()
        if error is None:
            for target in self._targets.values():
                os.replace(unfinished(target), target)


def read_part(
    path: Path, dtype: np.dtype[np.unsignedinteger], *, masked: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray | None, bool]]:
    """The tokens of a part in runs (n,), each with its mask (n,) uint8 or None, and whether a document ends after it.

    Args:
        path: without suffix.
    """
    with contextlib.ExitStack() as opened:
        file, ends = (opened.enter_context(open(path.with_name(path.name + suffix), "rb")) for suffix in (".bin", DOCS_SUFFIX))
        masks = opened.enter_context(open(path.with_name(path.name + MASK_SUFFIX), "rb")) if masked else None
        position = 0
        while (some := np.fromfile(ends, dtype="<u8", count=_READ_ENDS)).size:
            for end in some.tolist():
                while position < end:
                    ids = np.fromfile(file, dtype=dtype, count=min(end - position, _READ_TOKENS))
                    assert ids.size, f"{path} is shorter than its document ends say"
                    position += ids.size
                    mask = None if masks is None else np.fromfile(masks, dtype=np.uint8, count=ids.size)
                    yield ids, mask, position == end

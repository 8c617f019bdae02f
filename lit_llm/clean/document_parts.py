"""The result of one job: the documents that the rules kept, and what is needed to find duplicates among them.

The files of a part are named after its key. All but the first and the last are arrays without a header, a row a document:

| file | content |
|---|---|
| ``.jsonl`` | the lines of the output |
| ``.index`` | int64 (n, 2): where each line begins, and the bytes of its text |
| ``.wholes`` | uint64 (n, 2): a hash of the text, to find exact duplicates |
| ``.signatures`` | uint32 (n, permutations): MinHash signatures, to find near-duplicates |
| ``.bands`` | uint64 (bands, n): a hash of each band of the signatures |
| ``.json`` | counts. It is written last, so a part that has one is complete |
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np

from lit_llm.clean.removal_report import Tally
from lit_llm.clean.rules import Document
from lit_llm.clean.word_ngrams import band_hashes
from lit_llm.core.disk import read_json, write_text
from lit_llm.ingest.shard_manifest import from_json
from lit_llm.ingest.token_parts import part_file

LINES, COUNTS = ".jsonl", ".json"
INDEX, WHOLES, SIGNATURES, BANDS = ARRAYS = ".index", ".wholes", ".signatures", ".bands"
"""What follows the key in the names of a part's files."""

_ROWS = 2**14  # signatures that are hashed at a time


class PartWriter:
    """Write the documents of one part, and their arrays as far as they are given.

    Args:
        stack: when it ends without an exception, the files are there.
    """

    def __init__(self, folder: Path, key: str, stack: ExitStack) -> None:
        self._files = {suffix: stack.enter_context(part_file(folder / f"{key}{suffix}")) for suffix in (LINES, *ARRAYS)}

    def add(self, document: Document, *, whole: bytes | None, signature: np.ndarray | None) -> None:
        line = json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False).encode() + b"\n"
        self._files[INDEX].write(np.array([self._files[LINES].tell(), len(document.text.encode())], "<i8").tobytes())
        self._files[LINES].write(line)
        if whole is not None:
            self._files[WHOLES].write(whole)
        if signature is not None:
            self._files[SIGNATURES].write(signature.astype("<u4").tobytes())

    def write_bands(self, permutations: int, bands: int, rows: int) -> None:
        """Hash the bands of all signatures, when every document has been added."""
        file = self._files[SIGNATURES]
        documents = file.tell() // (4 * permutations)
        for start in range(0, documents, _ROWS):
            file.seek(start * 4 * permutations)
            some = np.frombuffer(file.read(_ROWS * 4 * permutations), "<u4").reshape(-1, permutations)
            for band, hashes in enumerate(band_hashes(some, bands, rows)):
                self._files[BANDS].seek(8 * (band * documents + start))
                self._files[BANDS].write(hashes.astype("<u8").tobytes())
        file.seek(0, os.SEEK_END)


def read_tally(folder: Path, key: str) -> Tally | None:
    """What the finished job ``key`` counted; None if it is not finished."""
    try:
        content = read_json(folder / f"{key}{COUNTS}")
    except FileNotFoundError:
        return None
    files = [folder / f"{key}{suffix}" for suffix in (LINES, *ARRAYS)]
    return from_json(Tally, content) if all(file.is_file() for file in files) else None  # some may have been deleted


def write_tally(folder: Path, key: str, tally: Tally) -> None:
    write_text(folder / f"{key}{COUNTS}", json.dumps(asdict(tally)))


class Parts:
    """All parts, whose documents are numbered from 0 in their order. 8 bytes of memory for each document.

    Args:
        permutations: values in a signature.
    """

    def __init__(self, folder: Path, keys: Sequence[str], *, permutations: int) -> None:
        self._folder, self._keys, self._permutations = folder, keys, permutations
        sizes = [np.fromfile(folder / f"{key}{INDEX}", "<i8").reshape(-1, 2)[:, 1].copy() for key in keys]
        self.sizes = np.concatenate(sizes)
        """(n,) int64: UTF-8 bytes of the text of each."""
        self.ends = np.cumsum([0, *map(len, sizes)])
        """(parts + 1,) int64: part i has the documents from ``ends[i]`` to ``ends[i + 1]``."""

    def __len__(self) -> int:
        return int(self.ends[-1])

    def wholes(self) -> np.ndarray:
        """(n, 2) uint64: the hash of each."""
        return np.concatenate([np.fromfile(self._folder / f"{key}{WHOLES}", "<u8").reshape(-1, 2) for key in self._keys])

    def band(self, band: int) -> np.ndarray:
        """(n,) uint64: the hash of one band of each."""
        counts = np.diff(self.ends).tolist()
        return np.concatenate(
            [
                np.fromfile(self._folder / f"{key}{BANDS}", "<u8", count=count, offset=8 * count * band)
                for key, count in zip(self._keys, counts, strict=True)
            ]
        )

    def signatures(self, numbers: np.ndarray) -> np.ndarray:
        """(m, permutations) uint32: the signatures of some documents (m,), whose numbers are sorted."""
        cuts = np.searchsorted(numbers, self.ends)
        found = [np.empty((0, self._permutations), np.uint32)]
        for part, key in enumerate(self._keys):
            wanted = numbers[cuts[part] : cuts[part + 1]] - self.ends[part]
            if len(wanted):
                rows = np.memmap(self._folder / f"{key}{SIGNATURES}", "<u4", "r").reshape(-1, self._permutations)
                found.append(np.array(rows[wanted]))
        return np.concatenate(found)

    def document(self, number: int) -> Document:
        part = int(np.searchsorted(self.ends, number, side="right")) - 1
        row = number - int(self.ends[part])
        start = np.fromfile(self._folder / f"{self._keys[part]}{INDEX}", "<i8", count=1, offset=16 * row)
        with open(self._folder / f"{self._keys[part]}{LINES}", "rb") as lines:
            lines.seek(int(start[0]))
            return Document(**json.loads(lines.readline()))

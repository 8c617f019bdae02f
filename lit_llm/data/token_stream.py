"""Read the tokens of shards.

Shards have the layout of ``lit_llm.ingest.shards``. nanoGPT's ``.bin`` files are bare uint16 without a header. They cannot
be recognised, so the user sets ``headerless``.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lit_llm.errors import UserError
from lit_llm.ingest.shards import HEADER_BYTES, HEADER_INTS, LAYOUTS

FULL_SCAN_TOKENS = 64_000_000  # scan() reads these in a fraction of a second


class TokenStream:
    """The tokens of several shards, concatenated.

    Each process maps the files into memory on first use; pickling (to a data worker) transfers only their names.

    Raises:
        UserError: one sentence for each file that is missing, empty, truncated, or not a shard.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, headerless: bool = False) -> None:
        assert paths, "a stream needs at least one file"
        self.paths = [Path(path) for path in paths]
        self._offset = 0 if headerless else HEADER_BYTES
        self._maps: dict[int, np.ndarray] = {}
        self._layouts: list[tuple[np.dtype, int]] = []  # token type and number of tokens of each shard
        problems = []
        for path in self.paths:
            try:
                self._layouts.append(_bare_layout(path) if headerless else _layout(path))
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise UserError("\n".join(problems))
        # The position of each shard's first token, then the total.
        self._starts = [0, *accumulate(count for _, count in self._layouts)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def itemsize(self) -> int:
        """Bytes of a token id on disk, in the first shard."""
        return self._layouts[0][0].itemsize

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length), unsigned integers (length,); read-only if they come from one shard."""
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens [{start}, {start + length}) of a stream of {len(self)}")
        shard = bisect_right(self._starts, start) - 1
        first = start - self._starts[shard]
        if start + length <= self._starts[min(shard + 1, len(self.paths))]:
            return self._map(shard)[first : first + length] if length else np.empty(0, dtype=np.uint16)
        parts = []
        while length:
            part = self._map(shard)[first : first + length]
            parts.append(part)
            length, shard, first = length - part.size, shard + 1, 0
        return np.concatenate(parts)

    def scan(self, vocab_size: int) -> str:
        """Check token ids against the vocabulary and return a hash of the content (hex).

        Up to 64 million tokens are read in full. Of a longer stream, 1,024 evenly spaced windows are read: enough to
        distinguish datasets, and every batch is checked when it is read.

        Raises:
            UserError: the shard, position and id of the first token outside the vocabulary.
        """
        window = 2**16
        starts = np.arange(0, len(self), window)
        if len(self) > FULL_SCAN_TOKENS:
            starts = np.linspace(0, len(self) - window, 1024).astype(np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for start in starts.tolist():
            tokens = self.read(start, min(window, len(self) - start))
            if tokens.max() >= vocab_size:
                raise self.bad_token(start + int(np.argmax(tokens >= vocab_size)), vocab_size)
            digest.update(tokens.astype("<u4").tobytes())  # the hash does not depend on how ids are stored
        return digest.hexdigest()

    def bad_token(self, position: int, vocab_size: int) -> UserError:
        """The error for a token outside the vocabulary at ``position``."""
        shard = bisect_right(self._starts, position) - 1
        return UserError(
            f"{self.paths[shard]} holds token id {int(self.read(position, 1)[0])} at position "
            f"{position - self._starts[shard]}, but the vocabulary has {vocab_size} ids, starting at 0 (--data.vocab_size)."
        )

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            dtype, count = self._layouts[shard]
            mapped = np.memmap(self.paths[shard], dtype=dtype, mode="r", offset=self._offset, shape=(count,))
            self._maps[shard] = mapped.view(np.ndarray)  # slicing a plain array is several times cheaper
        return self._maps[shard]


def _layout(path: Path) -> tuple[np.dtype, int]:
    """Token type and count of a shard with a header."""
    size = _size(path)
    header = np.fromfile(path, dtype="<i4", count=min(HEADER_INTS, size // 4))
    magic = int(header[0]) if header.size else None
    if magic not in LAYOUTS:
        expected = " or ".join(str(known) for known in LAYOUTS)
        raise UserError(
            f"{path} is not a token shard: it starts with {magic} instead of the magic number {expected} "
            "(if it holds bare uint16 tokens, as nanoGPT writes them, set --data.headerless true)."
        )
    version, dtype = LAYOUTS[magic]
    if header.size < HEADER_INTS:
        raise UserError(f"{path} is truncated: it has {size} bytes, but the header alone takes {HEADER_BYTES}.")
    if header[1] != version:
        raise UserError(f"{path} is a token shard of version {header[1]}: only version {version} is supported.")
    count = int(header[2])
    expected_size = HEADER_BYTES + count * dtype.itemsize
    if count < 1:
        raise UserError(f"{path} has {count} tokens in its header: a shard needs at least one.")
    if size != expected_size:
        what = "truncated" if size < expected_size else "too long"
        raise UserError(f"{path} is {what}: its header says {count} tokens = {expected_size} bytes, but it has {size}.")
    return dtype, count


def _bare_layout(path: Path) -> tuple[np.dtype, int]:
    """Token type and count of a file of bare uint16."""
    size = _size(path)
    if size == 0 or size % 2:
        raise UserError(f"{path} does not hold bare uint16 tokens: its size is {size} bytes, which must be even and not 0.")
    if size >= HEADER_BYTES and int(np.fromfile(path, dtype="<i4", count=1)[0]) in LAYOUTS:
        raise UserError(f"{path} is a token shard with a header: set --data.headerless false.")
    return np.dtype("<u2"), size // 2


def _size(path: Path) -> int:
    if not path.is_file():
        raise UserError(f"Token shard not found: {path}.")
    return path.stat().st_size

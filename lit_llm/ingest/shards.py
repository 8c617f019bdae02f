"""The layout of token shards on disk, and writing them.

The layout is llm.c's, so that its published FineWeb shards can be read unchanged. A shard is a header of 256 little-endian
int32, [magic, version, number of tokens, 0, ...], then the tokens:

    magic 20240520, version 1: uint16        magic 20240801, version 7: uint32
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lit_llm.disk import naming
from lit_llm.errors import UserError

HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
LAYOUTS: dict[int, tuple[int, np.dtype[Any]]] = {  # magic -> version, token type
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}


class ShardWriter:
    """Stream tokens into ``<folder>/<name>_000000.bin``, ``_000001.bin``, ...

    A shard is written to a temporary file in the same folder, synced to disk and renamed, so a file with its final name is
    complete. Use as a context manager: an exception removes the unfinished shard.

    Args:
        vocab_size: up to 65,536, shards hold uint16; above, uint32.
        shard_tokens: tokens per shard; the last shard may be shorter.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, *, vocab_size: int, shard_tokens: int) -> None:
        if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
            raise UserError(f"shard_tokens must be 1 to {MAX_SHARD_TOKENS}, not {shard_tokens} (--shard_tokens).")
        self.paths: list[Path] = []
        self.tokens = 0
        self._folder, self._name, self._shard_tokens = Path(folder), name, shard_tokens
        self._magic = 20240520 if vocab_size <= 2**16 else 20240801
        self._version, self._dtype = LAYOUTS[self._magic]
        self._file: Any = None
        self._in_shard = 0

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens (n,), which must be in [0, vocab_size)."""
        assert not tokens.size or tokens.max() <= np.iinfo(self._dtype).max
        with naming(self._folder):
            while tokens.size:
                if self._file is None:
                    self._open()
                part = tokens[: self._shard_tokens - self._in_shard]
                self._file.write(part.astype(self._dtype).tobytes())
                self._in_shard += part.size
                self.tokens += part.size
                tokens = tokens[part.size :]
                if self._in_shard == self._shard_tokens:
                    self._finish()

    def close(self) -> None:
        """Finish the last shard. Without any token, no file is written."""
        if self._file is not None:
            self._finish()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            with naming(self._folder):
                self.close()
        elif self._file is not None:
            with contextlib.suppress(OSError):  # a full disk refuses the rest of the buffer too
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _open(self) -> None:
        self._path = self._folder / f"{self._name}_{len(self.paths):06d}.bin"
        self._temporary = self._path.with_suffix(".bin.tmp")
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - stays open across write() calls
        self._file.write(bytes(HEADER_BYTES))  # written when the count is known
        self._in_shard = 0

    def _finish(self) -> None:
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = self._magic, self._version, self._in_shard
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self._temporary, self._path)
        self.paths.append(self._path)

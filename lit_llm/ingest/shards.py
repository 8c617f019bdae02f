"""The layout of token shards on disk, and the class that writes shards.

The layout is llm.c's, so that its published FineWeb shards can be read unchanged. A shard is a header of 256 little-endian
int32, [magic, version, number of tokens, 0, ...], then the tokens:

    magic 20240520, version 1: uint16        magic 20240801, version 7: uint32

A file of the same name with the suffix ``.docs`` says where documents end. For each document that ends in the shard, it has the
number of the shard's tokens up to the document's last one, as little-endian uint64. A split that was written without document
ends has no such files.

A file with the suffix ``.mask`` says which tokens are targets. It has one byte for each token: 1 if the token is a target, 0 if
it is only read. A split in which every token is a target has no such files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lit_llm.core.disk import complete_file, naming, write_bytes
from lit_llm.core.errors import UserError
from lit_llm.ingest.shard_manifest import ShardInfo

HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
LAYOUTS: dict[int, tuple[int, np.dtype[Any]]] = {  # magic -> version, token type
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}
DOCS_SUFFIX = ".docs"
DOCS_DTYPE = np.dtype("<u8")
MASK_SUFFIX = ".mask"
HASH_BYTES = 16  # the length of every BLAKE2b hash of tokens


def magic_for(vocab_size: int) -> int:
    """The magic number of shards for ids in [0, vocab_size). It tells their type: uint16 up to 65,536 ids, else uint32."""
    return 20240520 if vocab_size <= 2**16 else 20240801


def header(magic: int, tokens: int) -> bytes:
    """The header, 1,024 bytes, of a shard with the magic number ``magic`` and ``tokens`` tokens."""
    numbers = np.zeros(HEADER_INTS, dtype="<i4")
    numbers[:3] = magic, LAYOUTS[magic][0], tokens
    return numbers.tobytes()


class ShardWriter(contextlib.AbstractContextManager["ShardWriter"]):
    """Writes a stream of tokens into the shards ``<folder>/<name>_000000.bin``, ``_000001.bin``, ...

    A shard is written to a temporary file in the same folder, synced to disk and renamed, so a file with its final name is
    complete. The files of its document ends and its mask get their final names before the shard does. Use the writer as a
    context manager: an exception removes the unfinished shard.

    After closing:

    - ``shards``: a ``ShardInfo`` for each shard.
    - ``tokens``, ``documents``: how many tokens and documents were written. A document without tokens does not count.
    - ``tokens_blake2b``: hash of all ids as little-endian uint32, whatever the size of the shards and their token type.
    - ``targets``, ``mask_blake2b``: how many tokens are targets, and a hash of all masks; both None without masks.

    Args:
        name: the split, such as "train".
        vocab_size: number of token ids. Up to 65,536, shards hold uint16; above, uint32.
        shard_tokens: tokens per shard; the last shard may be shorter.
        masked: whether masks are written: every call of ``write`` then says which tokens are targets.

    Raises:
        UserError: if ``shard_tokens`` is out of range.
    """

    def __init__(
        self, folder: str | os.PathLike[str], name: str, *, vocab_size: int, shard_tokens: int, masked: bool = False
    ) -> None:
        if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
            raise UserError(f"shard_tokens must be 1 to {MAX_SHARD_TOKENS}, not {shard_tokens} (--shard_tokens).")
        self.shards: list[ShardInfo] = []
        self.tokens = self.documents = 0
        self._folder, self._name, self._shard_tokens = Path(folder), name, shard_tokens
        self._magic = magic_for(vocab_size)
        self._dtype = LAYOUTS[self._magic][1]
        self.targets = 0 if masked else None
        self._split_hash, self._masks_hash = _new_hash(), _new_hash()
        self._in_document = False  # whether tokens have been written since the last document's end
        self._opened: contextlib.ExitStack | None = None  # the files of the open shard
        self._in_shard = self._max_id = 0

    @property
    def paths(self) -> list[Path]:
        """The paths of the shards that are complete."""
        return [self._folder / shard.file for shard in self.shards]

    @property
    def tokens_blake2b(self) -> str:
        return self._split_hash.hexdigest()

    @property
    def mask_blake2b(self) -> str | None:
        return None if self.targets is None else self._masks_hash.hexdigest()

    def write(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append tokens (n,), which must be in [0, vocab_size).

        Args:
            mask: (n,) uint8, 1 for targets and 0 for other tokens; given if and only if the writer is ``masked``.
        """
        assert not tokens.size or 0 <= tokens.min() <= tokens.max() <= np.iinfo(self._dtype).max
        assert (mask is None) == (self.targets is None)
        assert mask is None or (mask.shape == tokens.shape and mask.max(initial=0) <= 1)
        with naming(self._folder):
            while tokens.size:
                if self._in_shard == self._shard_tokens:
                    self.close()  # not before: until then, a document may end with the shard
                if self._opened is None:
                    self._open()
                part = tokens[: self._shard_tokens - self._in_shard]
                stored = np.ascontiguousarray(part, dtype=self._dtype).data
                self._file.write(stored)
                self._shard_hash.update(stored)
                self._split_hash.update(np.ascontiguousarray(part, dtype="<u4").data)
                if mask is not None and self.targets is not None:
                    stored = np.ascontiguousarray(mask[: part.size], dtype=np.uint8).data
                    self._mask_file.write(stored)
                    self._mask_hash.update(stored)
                    self._masks_hash.update(stored)
                    self.targets += int(mask[: part.size].sum())
                    mask = mask[part.size :]
                self._max_id = max(self._max_id, int(part.max()))
                self._in_shard += part.size
                self.tokens += part.size
                self._in_document = True
                tokens = tokens[part.size :]

    def end_document(self) -> None:
        """End a document, which has the tokens written since the last call. Nothing happens if there are no such tokens."""
        if not self._in_document:
            return
        if not self.documents:  # this first document has filled the earlier shards
            self.shards = [replace(shard, docs_blake2b=_write_docs(self._folder / shard.file, [])) for shard in self.shards]
        self._ends.append(self._in_shard)
        self.documents += 1
        self._in_document = False

    def close(self) -> None:
        """Finish the last shard. No file is written for a shard without tokens."""
        if self._opened is None:
            return
        docs_hash = None
        opened, self._opened = self._opened, None
        with naming(self._folder), opened:
            self._file.seek(0)
            self._file.write(header(self._magic, self._in_shard))
            # Delete an older shard of that name first: after a kill, its tokens must not stand beside the new document ends.
            for suffix in (".bin", DOCS_SUFFIX, MASK_SUFFIX):
                self._path.with_suffix(suffix).unlink(missing_ok=True)
            if self.documents:
                docs_hash = _write_docs(self._path, self._ends)
        mask_hash = None if self.targets is None else self._mask_hash.hexdigest()
        tokens_hash = self._shard_hash.hexdigest()
        self.shards.append(
            ShardInfo(self._path.name, self._in_shard, len(self._ends), self._max_id, tokens_hash, mask_hash, docs_hash)
        )

    def __exit__(self, *raised: Any) -> None:
        if raised[1] is None:
            self.close()
        elif self._opened is not None:
            self._opened.__exit__(*raised)

    def _open(self) -> None:
        self._path = self._folder / f"{self._name}_{len(self.shards):06d}.bin"
        self._opened = contextlib.ExitStack()  # closed in reverse: the mask is published before the tokens
        self._file = self._new_file(".bin")
        self._file.write(bytes(HEADER_BYTES))  # written when the count is known
        if self.targets is not None:
            self._mask_file = self._new_file(MASK_SUFFIX)
        self._shard_hash, self._mask_hash = _new_hash(), _new_hash()
        self._in_shard = self._max_id = 0
        self._ends: list[int] = []

    def _new_file(self, suffix: str) -> BinaryIO:
        assert self._opened is not None
        return self._opened.enter_context(
            complete_file(self._path.with_suffix(suffix), self._path.with_suffix(f"{suffix}.tmp"))
        )


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=HASH_BYTES)


def _write_docs(shard: Path, ends: list[int]) -> str:
    """Write the document ends of the shard with the path ``shard`` to its ``.docs`` file, and return the hash of this file."""
    content = np.array(ends, dtype=DOCS_DTYPE).tobytes()
    write_bytes(shard.with_suffix(DOCS_SUFFIX), content)
    return hashlib.blake2b(content, digest_size=HASH_BYTES).hexdigest()

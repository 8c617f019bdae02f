"""The layout of a token file: an llm.c shard with a header, bare uint16 tokens, or Megatron's ``.bin`` with its ``.idx``.

nanoGPT's ``.bin`` files are bare uint16 tokens. A file without a header cannot be recognised, so the user sets ``headerless``.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from lit_llm.core.errors import UserError
from lit_llm.data import megatron
from lit_llm.ingest.shards import DOCS_DTYPE, DOCS_SUFFIX, HEADER_BYTES, HEADER_INTS, LAYOUTS, MASK_SUFFIX


class ShardLayout(NamedTuple):
    """Record of a token file: its path, and how it stores tokens (dtype, bytes before the first token, number of tokens)."""

    path: str
    dtype: np.dtype[Any]
    offset: int
    """The number of bytes before the first token of the file."""
    tokens: int
    megatron: bool = False
    masked: bool = False
    """Whether a mask file beside the token file says which of its tokens are targets of the loss."""

    @property
    def mask_path(self) -> str:
        return os.path.splitext(self.path)[0] + MASK_SUFFIX

    def mask_problem(self) -> str | None:
        """A sentence if the mask file is missing or does not have one byte for each token; None if its size is right."""
        if (size := size_of(self.mask_path)) is None:
            return f"The mask {self.mask_path} is missing: restore it, or prepare the data again."
        if size == self.tokens:
            return None
        return f"{self.mask_path} has {size} bytes, but {self.path} has {self.tokens} tokens: prepare the data again."

    @property
    def size(self) -> int:
        """The size in bytes that the token file must have."""
        return self.offset + self.tokens * self.dtype.itemsize

    @property
    def docs(self) -> str:
        """The path of the ``.docs`` file with the shard's document ends. Megatron's files have these in the ``.idx`` file."""
        return os.path.splitext(self.path)[0] + DOCS_SUFFIX

    def document_ends(self) -> np.ndarray | None:
        """The end of each document that ends in this file: the number of the file's tokens up to and with the document's last.

        Returns uint64 (n,), or None if document ends were not recorded.

        Raises:
            UserError: the document ends are damaged.
        """
        if self.megatron:
            return megatron.document_ends(self.path, self.dtype.itemsize, self.tokens)
        docs = self.docs
        if not os.path.exists(docs):
            return None
        if os.path.getsize(docs) % DOCS_DTYPE.itemsize:
            raise UserError(f"{docs} is damaged: its size is not a multiple of 8 bytes. Prepare the data again.")
        ends = np.fromfile(docs, dtype=DOCS_DTYPE)
        if ends.size and (ends[0] < 1 or ends[-1] > self.tokens or np.any(ends[1:] <= ends[:-1])):
            raise UserError(
                f"{docs} is damaged: its document ends do not increase from 1 to at most {self.tokens}, the tokens of "
                f"{self.path}. Prepare the data again."
            )
        return ends


def size_of(path: str) -> int | None:
    """The size of a file in bytes; None if the file is missing or cannot be looked at."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def read_layout(path: str, *, headerless: bool = False) -> ShardLayout:
    """Read the header and the size of a token file, and return its layout. The file is opened once.

    Args:
        headerless: the file holds bare uint16 tokens without a header.

    Raises:
        UserError: the file is missing, empty, truncated, or not a shard.
    """
    header, size = _start(path, 4 if headerless else HEADER_BYTES)
    if headerless:
        return _bare_layout(path, header, size)
    numbers = np.frombuffer(header[: len(header) // 4 * 4], dtype="<i4")
    magic = int(numbers[0]) if numbers.size else None
    if magic not in LAYOUTS:
        if (pair := megatron.layout(path, size)) is not None:
            return ShardLayout(path, pair[0], 0, pair[1], megatron=True)
        expected = " or ".join(str(known) for known in LAYOUTS)
        raise UserError(
            f"{path} is not a token shard: it starts with {magic} instead of the magic number {expected} "
            "(if it holds bare uint16 tokens, as nanoGPT writes them, set --data.headerless true)."
        )
    version, dtype = LAYOUTS[magic]
    if numbers.size < HEADER_INTS:
        raise UserError(f"{path} is truncated: it has {size} bytes, but the header alone takes {HEADER_BYTES}.")
    if numbers[1] != version:
        raise UserError(f"{path} is a token shard of version {numbers[1]}: only version {version} is supported.")
    layout = ShardLayout(path, dtype, HEADER_BYTES, int(numbers[2]))
    layout = layout._replace(masked=os.path.exists(layout.mask_path))
    if layout.tokens < 1:
        raise UserError(f"{path} has {layout.tokens} tokens in its header: a shard needs at least one.")
    says = f"its header says {layout.tokens} tokens = {layout.size} bytes"
    if problem := megatron.wrong_size(path, size, layout.size, says) or (layout.mask_problem() if layout.masked else None):
        raise UserError(problem)
    return layout


def _bare_layout(path: str, header: bytes, size: int) -> ShardLayout:
    if size == 0 or size % 2:
        raise UserError(f"{path} does not hold bare uint16 tokens: its size is {size} bytes, which must be even and not 0.")
    if size >= HEADER_BYTES and int.from_bytes(header, "little") in LAYOUTS:
        raise UserError(f"{path} is a token shard with a header: set --data.headerless false.")
    if megatron.has_index(path):
        raise UserError(f"{path} has the type of its tokens in {megatron.index_of(path)}: set --data.headerless false.")
    return ShardLayout(path, np.dtype("<u2"), 0, size // 2)


def _start(path: str, length: int) -> tuple[bytes, int]:
    """Return (first ``length`` bytes of a file, its size in bytes). A shorter file is returned whole."""
    try:
        with open(path, "rb") as file:
            return file.read(length), os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"Token shard not found: {path}.") from None
    except OSError as error:
        raise UserError(f"Token shard {path} cannot be read: {error.strerror}.") from error

"""Read Megatron's pairs of files: ``X.bin`` has the tokens without a header, ``X.idx`` their dtype and the documents.

``X.idx`` is little-endian: the magic ``MMIDIDX\\0\\0``, version 1 (uint64), a code of the token type (uint8), the number n of
sequences and m of document indices (uint64), then the number of tokens of each sequence (int32), each sequence's first byte in
``X.bin`` (int64), and m document indices (int64): document i has the sequences from index i to before index i + 1.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

from lit_llm.core.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}


def index_of(path: str) -> str:
    """The path of the index ``X.idx`` that belongs to the token file ``path``, which is ``X.bin``."""
    return os.path.splitext(path)[0] + ".idx"


def has_index(path: str) -> bool:
    """Whether there is an index in Megatron's format beside ``path``."""
    try:
        with open(index_of(path), "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def layout(path: str, size: int) -> tuple[np.dtype[Any], int] | None:
    """(dtype, number) of the tokens in Megatron's token file ``path``; None if there is no index ``X.idx`` beside the file.

    Args:
        size: the size of the file ``path`` in bytes.

    Raises:
        UserError: the index is damaged, or ``size`` is not the size that the index says.
    """
    if not has_index(path):
        return None
    index = index_of(path)
    with open(index, "rb") as file:
        dtype, sequences, _ = _header(index, file.read(_HEADER.size))
    [last] = np.fromfile(index, "<i4", 1, offset=_HEADER.size + 4 * (sequences - 1)).tolist()
    [start] = np.fromfile(index, "<i8", 1, offset=_HEADER.size + 4 * sequences + 8 * (sequences - 1)).tolist()
    expected = start + last * dtype.itemsize
    if problem := wrong_size(path, size, expected, f"{index} says {expected} bytes"):
        raise UserError(f"{problem} Restore both files.")
    return dtype, size // dtype.itemsize


def document_ends(path: str, itemsize: int, tokens: int) -> np.ndarray:
    """The end of each document in the token file ``path``, uint64 (n,): the number of tokens up to and with its last token.

    Documents without tokens are left out. ``itemsize`` is the size of a token in bytes, ``tokens`` the file's number of tokens.

    Raises:
        UserError: the index is damaged.
    """
    index = index_of(path)
    with open(index, "rb") as file:
        _, sequences, documents = _header(index, file.read(_HEADER.size))
        sizes = np.fromfile(file, dtype="<i4", count=sequences)
        starts = np.fromfile(file, dtype="<i8", count=sequences)
        bounds = np.fromfile(file, dtype="<i8", count=documents)
    ends = np.cumsum(sizes, dtype=np.int64)  # of each sequence, in tokens
    fits = np.array_equal(starts, (ends - sizes) * itemsize) and ends[-1] == tokens
    if not fits or bounds.size == 0 or bounds[0] != 0 or bounds.max() > sequences or np.any(bounds[1:] < bounds[:-1]):
        raise UserError(f"{index} is damaged: its sequences or documents do not follow each other. Restore the file.")
    positions = np.unique(np.concatenate([[0], ends])[bounds[1:]])
    return positions[positions > 0].astype(np.uint64)


def wrong_size(path: str, size: int, expected: int, says: str) -> str | None:
    """A sentence if the ``size`` of a file is not the ``expected`` one (both in bytes); None if it is.

    Args:
        says: a clause of the sentence about the source of the expected size: "meta.json says 8 tokens = 1040 bytes".
    """
    what = "truncated" if size < expected else "too long"
    return None if size == expected else f"{path} is {what}: {says}, but it has {size}."


def _header(index: str, header: bytes) -> tuple[np.dtype[Any], int, int]:
    """Parse ``header``, the first bytes of the file ``index``: (dtype of tokens, number of sequences, of document indices).

    Raises:
        UserError: the index is truncated or empty, or its version or token type is not supported.
    """
    size = os.path.getsize(index)
    if len(header) < _HEADER.size:
        raise UserError(f"{index} is truncated: it has {size} bytes, but its header alone takes {_HEADER.size}.")
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{index} is an index of version {version}: only version 1 is supported.")
    if code not in _DTYPES:
        raise UserError(f"{index} has token type {code}: token ids must be integers ({', '.join(map(str, _DTYPES))}).")
    if sequences == 0:
        raise UserError(f"{index} lists no sequences: give a file with tokens.")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    says = f"its header says {sequences} sequences and {documents} document indices = {expected} bytes"
    if problem := wrong_size(index, size, expected, says):
        raise UserError(problem)
    return _DTYPES[code], sequences, documents

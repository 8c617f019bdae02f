"""The packing plan, a file that lists the pieces of documents in each packed block.

A plan such as ``train_pack-T4096.idx`` lies beside the shards whose documents it packs into blocks of T = 4096 pairs of an
input and its target. All numbers in the file are little-endian:

    128 bytes: magic, version and T (uint32 each), `key_of` (16 bytes), number of pieces, `Counts` without padding, `cut` and
    `separated` of consecutive blocks (uint64 each), zeros
    for each piece, block after block: the position of its first input (uint64), its number of pairs (uint32)
    for each block the number of pieces before it, then the number of all pieces (uint64)
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_llm.core.disk import complete_file, is_disk_error
from lit_llm.core.errors import UserError, refuse
from lit_llm.data.document_ends import Documents, missing_documents
from lit_llm.data.open_files import OpenFiles
from lit_llm.data.packing import PIECE, POOL, Counts, consecutive, pack
from lit_llm.data.stored_files import StoredFiles
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shards import DOCS_DTYPE, DOCS_SUFFIX, HASH_BYTES

MOST_COUNTED = 5_000_000
"""The most documents that `planned` packs. Packing this many documents takes a few seconds."""
_MAGIC, _VERSION = b"LITPACK\0", 1
_HEADER = struct.Struct("<8sII16sQ5Q2Q")
_HEADER_BYTES = 128
_INDEX = np.dtype("<u8")


class PackPlan:
    """Reads a packing plan from its file. Looking up a block takes two small reads. Pickling transfers no content of the file.

    Raises:
        UserError: the file is not a plan, is damaged, or is the plan of other data or another block size.
    """

    def __init__(self, path: Path, *, size: int, key: bytes) -> None:
        """Open the plan in the file ``path``, and check its header and size.

        Args:
            size: pairs of an input and its target in a block, T.
            key: the result of `key_of` for the documents. The file must have the same key.
        """
        self.path, self.size = path, size
        self._files = OpenFiles()
        with open(path, "rb") as file:
            header, length = file.read(_HEADER_BYTES), os.fstat(file.fileno()).st_size
        if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
            raise UserError(f"{path} is not a plan of packing: delete it, and the next run makes it again.")
        _, version, planned, made_for, pieces, *counts, cut, separated = _HEADER.unpack_from(header)
        if (version, planned, made_for) != (_VERSION, size, key):
            raise UserError(
                f"{path} is the plan of other shards, of another tokenizer's, or for blocks of {planned} tokens: delete it, "
                "and the next run makes it again."
            )
        blocks, documents, targets = counts[:3]
        if length != _HEADER_BYTES + pieces * PIECE.itemsize + (blocks + 1) * _INDEX.itemsize:
            raise self._damage()
        self.pieces = pieces
        self.counts = Counts(*counts)._replace(padding=blocks * size - targets)
        self.consecutive = Counts(0, documents, targets, cut, separated)

    def __len__(self) -> int:
        """The number of blocks."""
        return self.counts.blocks

    def block(self, number: int) -> np.ndarray:
        """The pieces of documents in block number ``number``, counted from 0: (n,) of dtype `PIECE`, (position, length) each.

        Raises:
            UserError: the file is damaged.
        """
        index = _HEADER_BYTES + self.pieces * PIECE.itemsize + number * _INDEX.itemsize
        first, end = np.frombuffer(self._read(index, 2 * _INDEX.itemsize), dtype=_INDEX).tolist()
        if not first < end <= self.pieces or end - first > self.size:
            raise self._damage()
        content = self._read(_HEADER_BYTES + first * PIECE.itemsize, (end - first) * PIECE.itemsize)
        pieces = np.frombuffer(content, dtype=PIECE)
        if pieces["length"].sum(dtype=np.int64) > self.size:
            raise self._damage()
        return pieces

    def _read(self, start: int, length: int) -> bytes:
        mend = "delete what is left of the plan, and make it again by starting the run"
        return self._files.read(str(self.path), start, length, random=True, mend=mend)

    def _damage(self) -> UserError:
        return UserError(f"{self.path} is damaged: delete it, and the next run makes it again.")


def open_plan(documents: Documents, *, size: int, tokens_hash: str) -> PackPlan:
    """Open a stream's packing plan, a file beside the shards. If it is missing, make it and print what packing cuts.

    Args:
        documents: the documents to pack, of one stream.
        size: pairs of an input and its target in a block, T.
        tokens_hash: hash of the stream (`TokenStream.scan`).

    Raises:
        UserError: as `PackPlan` and `write_plan` raise, or a shard does not say where documents end, or the plan has no blocks.
    """
    if (shard := missing_documents(documents.stream)) is not None:
        raise UserError(
            f"packing best_fit needs to know where documents end, and {shard} has no .docs file: prepare the data again, or "
            "set --data.packing concatenate."
        )
    key = key_of(documents, tokens_hash)
    path = path_of(documents.stream, size, key)
    if is_new := not path.exists():
        refuse(StoredFiles(file for file in documents.stream.files() if file.path.endswith(DOCS_SUFFIX)).problems())
    long = write_plan(path, documents, size=size, key=key) if is_new else 0
    plan = PackPlan(path, size=size, key=key)
    if is_new:
        left_out = f". Left out: {long:,} pairs of more than {size:,} tokens (--data.block_size)" if long else ""
        rank_zero_info(f"{path}: {report(plan.counts, plan.consecutive)}{left_out}")
    if not len(plan) and documents.stream.pairs:
        raise UserError(f"Every pair of {path.parent} has more than {size:,} tokens: raise --data.block_size.")
    if not len(plan):
        raise UserError(
            f"The training documents of {path.parent} have a single token each, so that nothing can be predicted: give longer "
            "ones, or set --data.packing concatenate."
        )
    return plan


def planned(stream: TokenStream, *, size: int) -> tuple[Counts, Counts] | None:
    """Count what packing would do to a stream's documents, without writing a plan.

    Returns (counts of packed blocks, counts of blocks of consecutive tokens, for comparison), for blocks of ``size`` pairs of
    an input and its target. None if there are more than `MOST_COUNTED` documents, no manifest, or no document ends.

    Raises:
        UserError: the document ends are damaged.
    """
    if stream.ends_open is None or missing_documents(stream) is not None:
        return None
    if sum(os.path.getsize(layout.docs) // DOCS_DTYPE.itemsize for layout in stream.layouts) > MOST_COUNTED:
        return None
    documents = Documents(stream, ends_open=stream.ends_open)
    counts, other = Counts(), Counts()
    for starts, lengths, _ in _pools(documents, size):
        counts, other = counts + pack(starts, lengths, size)[2], other + consecutive(starts, lengths, size)
    return counts, other


def report(packed: Counts, other: Counts) -> str:
    """One line of text that says what packing does to the documents: blocks, padding, and how many documents are cut.

    Args:
        packed: counts of the packed blocks.
        other: counts of consecutive blocks.
    """
    return (
        f"{packed.documents:,} documents in {packed.blocks:,} blocks, {packed.padding_share:.2%} padding. "
        f"Cut: {packed.cut_share:.1%} of the documents (concatenate: {other.cut_share:.1%}). "
        f"Apart from the start of their document: {packed.separated_share:.1%} of the tokens "
        f"(concatenate: {other.separated_share:.1%})"
    )


def path_of(stream: TokenStream, size: int, key: bytes) -> Path:
    """The path of a stream's packing plan, such as ``train_pack-T4096.idx``: named after the first shard and the block size.

    If the stream has only some of a split's shards, the name also has the start of ``key``, so that the plan does not replace
    the plan of all shards.
    """
    first = stream.paths[0]
    name = re.sub(r"_[0-9]+$", "", first.stem)
    shards = first.parent.glob(f"{glob.escape(name)}_*{glob.escape(first.suffix)}")
    some = "" if {first, *shards} <= set(stream.paths) else f"-{key.hex()[:8]}"
    return first.with_name(f"{name}_pack-T{size}{some}.idx")


def key_of(documents: Documents, tokens_hash: str) -> bytes:
    """A hash that changes if the tokens, shards or document ends change, which with the block size decide a packing plan.

    Args:
        tokens_hash: hash of the stream (`TokenStream.scan`).
    """
    shards = [(layout.tokens, 0 if layout.megatron else os.path.getsize(layout.docs)) for layout in documents.stream.layouts]
    listed = [file.blake2b for file in documents.stream.files() if file.path.endswith(DOCS_SUFFIX)]
    content = repr((_VERSION, POOL, tokens_hash, shards, listed, documents.ends_open, *(["pairs"] * documents.stream.pairs)))
    return hashlib.blake2b(content.encode(), digest_size=HASH_BYTES).digest()


def write_plan(path: Path, documents: Documents, *, size: int, key: bytes) -> int:
    """Pack all documents into blocks of ``size`` pairs. Write the plan, with ``key``, to ``path``, complete or not at all.

    Memory holds a pool of documents, the document ends of one shard, and 8 bytes for each block.

    Returns:
        The number of preference pairs that are left out, because they are longer than a block.

    Raises:
        UserError: the folder cannot be written or is gone, or the document ends are damaged.
    """
    name = f".{path.name}.{uuid4().hex[:8]}.partial"  # machines may share the folder, and containers may have equal process ids
    try:
        with complete_file(path, path.with_name(name)) as file:
            return _write(file, documents, size, key)
    except OSError as error:
        mend = "Make its folder writable once, or set --data.packing concatenate."
        if isinstance(error, FileNotFoundError):
            mend = "Its shards were deleted: repeat the command."
        elif not is_disk_error(error):
            raise
        raise UserError(f"The plan of packing {path} cannot be written: {error.strerror}. {mend}") from error


def _pools(documents: Documents, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield (starts (n,), lengths (n,), left out) for each pool of documents.

    A start is the position of a document's first input, a length its number of pairs of an input and its target. Left out is
    the number of preference pairs that are longer than a block."""
    for starts, lengths in documents.pools(POOL):
        fits = lengths <= size if documents.stream.pairs else np.ones(len(lengths), dtype=bool)
        yield starts[fits], lengths[fits], int(np.sum(~fits))


def _write(file: BinaryIO, documents: Documents, size: int, key: bytes) -> int:
    counts, other, pieces, left_out = Counts(), Counts(), 0, 0
    ends: list[np.ndarray] = []  # for each pool and each of its blocks: the number of pieces up to the end of the block
    file.write(bytes(_HEADER_BYTES))  # written when the counts are known
    for starts, lengths, long in _pools(documents, size):
        left_out += long
        packed, of_blocks, added = pack(starts, lengths, size)
        file.write(packed.tobytes())
        ends.append((pieces + np.cumsum(of_blocks)).astype(_INDEX))
        counts, other, pieces = counts + added, other + consecutive(starts, lengths, size), pieces + len(packed)
    file.write(bytes(_INDEX.itemsize))
    for of_pool in ends:
        file.write(of_pool.tobytes())
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, _VERSION, size, key, pieces, *counts[:5], other.cut, other.separated))
    return left_out

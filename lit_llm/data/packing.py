"""Best-fit-decreasing packing: which pieces of documents share a block.

A document gives pairs of an input and its target; a block has room for T pairs. A document of more than T pairs is cut from
its start into blocks of T pairs. The pairs after the last full block are a piece, as a whole short document is. The pieces of a
pool of documents are placed longest first, each into the block with the least room that suffices (Ding et al. 2024, arXiv
2404.10830). Nothing is random.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

POOL = 2**18
"""The number of documents that are packed together, which a packing plan depends on. A larger pool would not reduce padding."""
PIECE = np.dtype([("start", "<u8"), ("length", "<u4")])
"""The dtype of a piece of a document: the position of its first input in the stream, and its number of input-target pairs."""


class Counts(NamedTuple):
    """Record of what one way to fill blocks (packed, or consecutive tokens) does to documents. ``+`` adds two pools' counts."""

    blocks: int = 0
    documents: int = 0
    targets: int = 0
    """The number of pairs of an input and its target in all documents."""
    cut: int = 0
    """The number of documents that are cut, so that parts of the document are in several blocks."""
    separated: int = 0
    """The number of targets that are in another block than the start of their document."""
    padding: int = 0
    """The number of positions of blocks that no pair of an input and its target fills."""

    @property
    def cut_share(self) -> float:
        return self.cut / max(self.documents, 1)

    @property
    def separated_share(self) -> float:
        return self.separated / max(self.targets, 1)

    @property
    def padding_share(self) -> float:
        return self.padding / max(self.targets + self.padding, 1)

    def __add__(self, other: object) -> Counts:
        assert isinstance(other, Counts)
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def pack(starts: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, Counts]:
    """Pack one pool of documents into blocks.

    Args:
        starts: (n,) position of each document's first input in the stream.
        lengths: (n,) each document's number of pairs of an input and its target, at least 1.
        size: pairs of an input and its target in a block, T.

    Returns:
        The pieces (p,) of dtype `PIECE`, block after block; the number of pieces in each block (b,); and the counts.
    """
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    whole, rest = lengths // size, lengths % size
    document = np.repeat(np.arange(len(lengths)), whole)  # the document of each full block
    number = np.arange(len(document)) - np.repeat(np.cumsum(whole) - whole, whole)  # 0, 1, … within its document
    short = np.flatnonzero(rest)
    blocks = best_fit(rest[short], size)
    order = np.lexsort((-rest[short], blocks))  # by block, the longest piece first
    pieces = np.empty(len(document) + len(short), dtype=PIECE)
    pieces["start"] = np.concatenate((starts[document] + number * size, (starts + whole * size)[short][order]))
    pieces["length"] = np.concatenate((np.full(len(document), size), rest[short][order]))
    per_block = np.concatenate((np.ones(len(document), dtype=np.int64), np.bincount(blocks)))
    cut = lengths > size
    targets = int(lengths.sum())
    counts = Counts(
        blocks=len(per_block),
        documents=len(lengths),
        targets=targets,
        cut=int(cut.sum()),
        separated=int((lengths[cut] - size).sum()),
        padding=len(per_block) * size - targets,
    )
    return pieces, per_block, counts


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """For each of n pieces, the number of the block into which best-fit-decreasing packing puts it: (n,), counted from 0.

    ``lengths`` (n,): each piece's number of pairs, from 1 to ``size``, the pairs of a block. Among blocks with equal room, the
    block that was filled last gets the piece.
    """
    numbers = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    blocks_with: list[list[int]] = [[] for _ in range(size + 1)]  # room → the numbers of the blocks with this room
    rooms = 0  # bit r: there is a block with room r
    chosen = []
    count = 0
    for length in lengths[order].tolist():
        if enough := rooms >> length:
            room = length + (enough & -enough).bit_length() - 1
            blocks = blocks_with[room]
            block = blocks.pop()
            if not blocks:
                rooms ^= 1 << room
        else:
            room, block = size, count
            count += 1
        chosen.append(block)
        if left := room - length:
            blocks_with[left].append(block)
            rooms |= 1 << left
    numbers[order] = chosen
    return numbers


def consecutive(starts: np.ndarray, lengths: np.ndarray, size: int) -> Counts:
    """Count the documents that blocks of consecutive tokens would cut. `blocks` and `padding` are 0. Arguments as in `pack`."""
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    in_first = size - starts % size  # pairs up to the end of the block in which the document starts
    cut = lengths > in_first
    separated = int((lengths - in_first)[cut].sum())
    return Counts(documents=len(lengths), targets=int(lengths.sum()), cut=int(cut.sum()), separated=separated)

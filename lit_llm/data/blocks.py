"""Datasets that turn token streams into batches. A stream is divided into numbered blocks of T inputs and T targets.

A batch is a dict of tensors:

- ``input_ids``, ``targets``: (B, T) int64. ``targets[b, t]`` is the token after ``input_ids[b, t]``. It is -100 where there is
  nothing to predict, or where a mask says that the token is no target.
- ``documents``: (B, T) int32, if the model needs document numbers: for each input the number, within the row, of its document.
  The numbers never decrease along a row.
- ``pairs``: (B, P) int64, only for preference data (``PairBlocks``).
- ``teacher_ids`` (B, T, k) int32 and ``teacher_logp`` (B, T, k) int16, if an objective distils a teacher: the k ids that the
  teacher finds likeliest as each target (``lit_llm.data.teacher``), and their log-probabilities as the bits of float16, because
  precisions that convert batches would round floats.

A sampler yields the block numbers of a whole micro-batch, and the dataset reads it at once (``DataLoader(batch_size=None)``).
There are no per-sample Python objects and no collation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_llm.core._torch import IGNORED
from lit_llm.core.errors import UserError
from lit_llm.data.document_ends import Documents
from lit_llm.data.pack_plan import PackPlan
from lit_llm.data.teacher import Teacher
from lit_llm.data.token_stream import TokenStream


class Rows(NamedTuple):
    """Record of the arrays of a micro-batch: B rows, one per block. A field that is None is left out of the batch."""

    input_ids: np.ndarray
    """(B, T) int64: the input token ids."""
    targets: np.ndarray
    """(B, T) int64: the token id after each input; -100 where there is no target."""
    documents: np.ndarray | None = None
    """(B, T) int32: the number, within its row, of each input's document."""
    pairs: np.ndarray | None = None
    """(B, P) int64: the position of the first input of each preference pair of a row (`PairBlocks`)."""
    teacher_ids: np.ndarray | None = None
    """(B, T, k) int32: the k token ids that a teacher finds likeliest as each target."""
    teacher_logp: np.ndarray | None = None
    """(B, T, k) int16: the teacher's log-probabilities of ``teacher_ids``, as the bits of float16."""

    def batch(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in self._asdict().items() if array is not None}


class Blocks(Dataset, ABC):
    """Base class of datasets whose items are micro-batches of blocks. A block has T inputs and T targets.

    Datasets are indexed by the addresses of blocks. An address is a block's number; in a mixture, (source, number).
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of blocks in one data epoch."""

    @abstractmethod
    def rows(self, blocks: np.ndarray) -> Rows:
        """Read the blocks with the addresses ``blocks``, (B,) or in a mixture (B, 2), as the rows of a micro-batch."""

    def __getitem__(self, blocks: np.ndarray) -> dict[str, Tensor]:
        return self.rows(blocks).batch()


class StreamBlocks(Blocks):
    """Base class of datasets of the blocks of one token stream. A block consists of pieces: runs of consecutive tokens.

    The positions after the last piece of a block are padding, which has no targets and the document number T.

    Args:
        documents: the document ends of the stream; None: batches have no ``documents``.
    """

    _random = True  # whether blocks are read in random order
    teacher: Teacher | None = None  # the teacher's predictions for the stream; None: batches have none

    def __init__(self, stream: TokenStream, *, block_size: int, vocab_size: int, documents: Documents | None = None) -> None:
        self.stream, self.block_size, self.vocab_size, self.documents = stream, block_size, vocab_size, documents

    @abstractmethod
    def pieces(self, block: int) -> list[tuple[int, int]]:
        """The pieces of a block, in order: for each, the position of its first input in the stream, and its number of pairs of
        an input and its target. ``block``: the block's number."""

    def rows(self, blocks: np.ndarray) -> Rows:
        rows = self._padding(len(blocks))
        starts: list[list[int]] = []  # the starts of the pieces of each row
        for row, block in enumerate(blocks.tolist()):
            at, pieces = 0, self.pieces(block)
            for number, (start, pairs) in enumerate(pieces):
                place = row, slice(at, at + pairs)
                self._read_pairs(start, rows.input_ids[place], rows.targets[place])
                if rows.documents is not None:
                    rows.documents[place] = self._numbers(number, start, rows.targets[place])
                if self.teacher is not None and rows.teacher_ids is not None and rows.teacher_logp is not None:
                    given = self.teacher.read(start, pairs)
                    rows.teacher_ids[place], rows.teacher_logp[place] = given["ids"], given["logp"].view(np.int16)
                at += pairs
            if rows.documents is not None:
                rows.documents[row, at:] = self.block_size
            starts.append([start for start, _ in pieces])
        return self._completed(rows, starts)

    def _numbers(self, number: int, start: int, targets: np.ndarray) -> np.ndarray | int:
        """Return the number, within its row, of the document of each of a piece's n inputs: (n,), or one number for all.

        ``number``: the piece's number in its row. ``start``: the stream position of the piece's first input. ``targets`` (n,):
        the piece's targets, of which a subclass may set some to -100."""
        return number

    def _completed(self, rows: Rows, starts: list[list[int]]) -> Rows:
        return rows

    def _padding(self, rows: int) -> Rows:
        """Return ``rows`` rows of padding: all targets are -100, and all inputs id 0 (attention is causal: any id would do)."""
        shape = rows, self.block_size
        documents = None if self.documents is None else np.zeros(shape, dtype=np.int32)
        padding = Rows(np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64), documents)
        if self.teacher is None:
            return padding
        given = *shape, self.teacher.info.top_k
        return padding._replace(teacher_ids=np.zeros(given, np.int32), teacher_logp=np.zeros(given, np.int16))

    def _read_pairs(self, start: int, input_ids: np.ndarray, targets: np.ndarray) -> None:
        """Fill ``input_ids`` (n,) with the stream's tokens from position ``start`` on, ``targets`` (n,) with the next tokens.

        The target is -100 where the stream's mask says that the token is no target.
        """
        tokens = self.stream.read(start, len(targets) + 1, random=self._random)
        # Checked on the host, for microseconds: in the embedding, an id beyond the table is undefined behaviour.
        if tokens.max() >= self.vocab_size:
            raise self.stream.bad_token(start + int(np.argmax(tokens >= self.vocab_size)), self.vocab_size)
        input_ids[:], targets[:] = tokens[:-1], tokens[1:]
        if (mask := self.stream.read_mask(start + 1, len(targets), random=self._random)) is not None:
            targets[mask == 0] = IGNORED


class TrainBlocks(StreamBlocks):
    """Dataset of the M = (N - 1) // T full blocks of a training stream of N tokens; T is the block size.

    Block i starts at token i * T, wherever documents begin. So the last target of a block is the first input of the next block.
    """

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.block_size

    def pieces(self, block: int) -> list[tuple[int, int]]:
        start = block * self.block_size
        pairs = min(self.block_size, len(self.stream) - 1 - start)  # a single last token is the target of the previous block
        return [(start, pairs)] if pairs > 0 else []

    def _numbers(self, number: int, start: int, targets: np.ndarray) -> np.ndarray:
        assert self.documents is not None
        return self.documents.numbers(start, len(targets))


class HeldOutBlocks(TrainBlocks):
    """Dataset of a held-out stream's blocks: each token except the first is a target once, and the last block is padded.

    A number larger than the last block's gives a block of padding, so that all ranks have the same number of batches.
    """

    _random = False

    def __len__(self) -> int:
        return -(-(len(self.stream) - 1) // self.block_size)


class PackedBlocks(StreamBlocks):
    """Dataset of the blocks of a `PackPlan`, which lists the pieces of each block.

    Args:
        plan: the packing plan of ``stream`` for blocks of ``block_size`` pairs of an input and its target.
        kwargs: the arguments of ``StreamBlocks``.
    """

    def __init__(self, stream: TokenStream, plan: PackPlan, **kwargs: Any) -> None:
        super().__init__(stream, **kwargs)
        assert plan.size == self.block_size
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def pieces(self, block: int) -> list[tuple[int, int]]:
        pieces = self.plan.block(block).tolist() if block < len(self.plan) else []  # a held-out set ends in padding
        if any(start + pairs >= len(self.stream) for start, pairs in pieces):
            raise UserError(f"{self.plan.path} is damaged: delete it, and the next run makes it again.")
        return pieces


class PairBlocks(PackedBlocks):
    """Dataset of blocks of preference data. Each piece of the plan is a chosen document and the rejected one after it.

    In ``documents``, pair i of a row has the numbers 2 i (chosen) and 2 i + 1 (rejected). A batch also has ``pairs`` (B, P):
    for each pair of a row the position of its first input, counted over all streams of the corpus. P is the largest number of
    pairs in a row of the batch; rows with fewer pairs end in -1. No two blocks share a pair.

    Args:
        first: the number of tokens in the corpus's streams before this stream.
        kwargs: the arguments of ``PackedBlocks``, with ``documents``.
    """

    def __init__(self, *args: Any, first: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first = first

    def _numbers(self, number: int, start: int, targets: np.ndarray) -> np.ndarray:
        assert self.documents is not None
        documents = self.documents.numbers(start, len(targets))  # 0: the chosen document; 1: the rejected document
        targets[:-1][np.diff(documents) > 0] = IGNORED  # the first token of the rejected document
        return 2 * number + documents

    def _completed(self, rows: Rows, starts: list[list[int]]) -> Rows:
        pairs = np.full((len(starts), max(1, *map(len, starts))), -1, dtype=np.int64)
        for row, of_row in zip(pairs, starts, strict=True):
            row[: len(of_row)] = np.array(of_row, dtype=np.int64) + self.first
        return rows._replace(pairs=pairs)


class MixtureBlocks(Blocks):
    """Dataset of the blocks of a mixture. An address is (number of a source, number of a block in the source).

    Batches also have ``sources``, (B,) int64: the number of each row's source.

    Args:
        blocks: number of a source → the blocks of the source.
    """

    def __init__(self, blocks: Mapping[int, Blocks]) -> None:
        self.blocks = dict(blocks)

    def __len__(self) -> int:
        return sum(map(len, self.blocks.values()))

    def rows(self, blocks: np.ndarray) -> Rows:
        sources = np.unique(blocks[:, 0]).tolist()
        parts = [(blocks[:, 0] == source, self.blocks[source]) for source in sources]
        read = [of_source.rows(blocks[here, 1]) for here, of_source in parts]
        if len(read) == 1:
            return read[0]
        whole = [None if array is None else np.empty((len(blocks), *array.shape[1:]), array.dtype) for array in read[0]]
        for (here, _), rows in zip(parts, read, strict=True):
            for target, array in zip(whole, rows, strict=True):
                if target is not None:
                    target[here] = array
        return Rows._make(whole)

    def __getitem__(self, blocks: np.ndarray) -> dict[str, Tensor]:
        return super().__getitem__(blocks) | {"sources": torch.from_numpy(np.ascontiguousarray(blocks[:, 0]))}


class HeldOutMixtureBlocks(MixtureBlocks):
    """Dataset of a mixture's held-out blocks. An address is one number, which counts the blocks of all sources together.

    A number larger than the last block's gives padding. The sources alternate evenly in this order. So the first batches have
    text of all sources, even if `limit_val_batches` skips later batches.
    """

    def __init__(self, blocks: Mapping[int, Blocks]) -> None:
        super().__init__(blocks)
        sizes = list(map(len, self.blocks.values()))
        each = np.concatenate([np.arange(size) for size in sizes])  # (n,) block in its source
        order = np.argsort((each + 0.5) / np.repeat(sizes, sizes), kind="stable")
        self._addresses = np.stack([np.repeat(list(self.blocks), sizes), each], axis=1)[order]  # (n, 2)
        self._padding = list(self.blocks)[-1], sizes[-1]

    def __getitem__(self, blocks: np.ndarray) -> dict[str, Tensor]:
        there = blocks < len(self._addresses)  # other numbers become the number after the last block of the last source
        return super().__getitem__(np.where(there[:, None], self._addresses[np.where(there, blocks, 0)], self._padding))

"""From a token stream to batches: training blocks in the global order, held-out blocks in file order.

Every batch is a dict of two int64 tensors (B, T): ``input_ids``, and ``targets``, where ``targets[b, t]`` is the token
after ``input_ids[b, t]``, or -100 where there is nothing to predict. A sampler yields the block numbers of a whole
micro-batch, and the dataset reads it at once (``DataLoader(batch_size=None)``). There are no per-sample Python objects and
no collation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_llm.data.order import sample_index
from lit_llm.data.token_stream import TokenStream

IGNORE = -100
# The length of an endless loader. Lightning sums lengths over ranks in int64, so it must stay far below 2**63.
ENDLESS = 2**48
_AHEAD = 4096  # samples computed at once: numpy's cost per call is then below 0.1 us per sample


class _Blocks(Dataset):
    """Blocks of T inputs and T targets. Block i starts at token i * T, so consecutive blocks share one token."""

    _random: bool  # whether blocks are read in random order

    def __init__(self, stream: TokenStream, *, block_size: int, vocab_size: int) -> None:
        self.stream, self.block_size, self.vocab_size = stream, block_size, vocab_size

    def _rows(self, blocks: np.ndarray) -> np.ndarray:
        """The T + 1 tokens of each block, (B, T + 1) int64, with -100 after the end of the stream."""
        rows = np.full((len(blocks), self.block_size + 1), IGNORE, dtype=np.int64)
        for row, block in zip(rows, blocks.tolist(), strict=True):
            start = block * self.block_size
            length = min(self.block_size + 1, len(self.stream) - start)
            if length > 1:  # a single last token is the target of the previous block
                row[:length] = self.stream.read(start, length, random=self._random)
        # Checked on the host, for microseconds: in the embedding, an id beyond the table is undefined behaviour.
        if rows.max() >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0].tolist()
            raise self.stream.bad_token(int(blocks[row]) * self.block_size + column, self.vocab_size)
        return rows


class TrainBlocks(_Blocks):
    """The M = (N - 1) // T full blocks of a training stream of N tokens."""

    _random = True

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.block_size

    def __getitem__(self, blocks: np.ndarray) -> dict[str, Tensor]:
        rows = self._rows(blocks)  # (B, T + 1)
        return {
            "input_ids": torch.from_numpy(np.ascontiguousarray(rows[:, :-1])),  # (B, T)
            "targets": torch.from_numpy(np.ascontiguousarray(rows[:, 1:])),  # (B, T)
        }


class HeldOutBlocks(_Blocks):
    """A held-out stream: every token except the first is a target exactly once, and the last block is padded.

    Blocks after the end contain only padding, so that all ranks have the same number of batches.
    """

    _random = False

    def __len__(self) -> int:
        return -(-(len(self.stream) - 1) // self.block_size)

    def __getitem__(self, blocks: np.ndarray) -> dict[str, Tensor]:
        rows = self._rows(blocks)  # (B, T + 1)
        inputs = rows[:, :-1].copy()  # (B, T)
        inputs[inputs == IGNORE] = 0  # any valid id: its target is ignored, and attention is causal
        return {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(np.ascontiguousarray(rows[:, 1:]))}


class GlobalOrder(DistributedSampler):
    """This rank's micro-batches of the training order: arrays of block numbers (micro_batch_size,).

    Each step reads the global samples after those of the previous step. Rank r of W takes the r-th of W equal contiguous
    parts and splits it into micro-batches. Iteration starts at sample ``consumed()``, so a resumed run continues in the same
    place with any number of ranks, workers or micro-batches.

    A ``DistributedSampler`` prevents Lightning from injecting its own shuffling sampler.

    Args:
        batch_samples: global samples of step n, as a function of n (from 0), a multiple of ``micro_batch_size * world_size``.
        step: optimizer steps so far; called when iteration starts.
        consumed: global samples consumed so far; called when iteration starts.
        batches: micro-batches of the whole run, for ``len``.
        remaining: micro-batches still to come; called when iteration starts.
    """

    def __init__(
        self,
        blocks: TrainBlocks,
        *,
        seed: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        batch_samples: Callable[[int], int],
        step: Callable[[], int],
        consumed: Callable[[], int],
        batches: Callable[[], int],
        remaining: Callable[[], int],
    ) -> None:
        super().__init__(blocks, num_replicas=world_size, rank=rank, shuffle=False, seed=seed)
        self.samples, self.micro_batch_size = len(blocks), micro_batch_size
        self.batch_samples, self.step = batch_samples, step
        self.consumed, self.batches, self.remaining = consumed, batches, remaining

    def __len__(self) -> int:
        return self.batches()

    def __iter__(self) -> Iterator[np.ndarray]:
        step, start, remaining = self.step(), self.consumed(), self.remaining()
        while remaining > 0:
            parts: list[np.ndarray] = []  # per step: (G / W,) global sample numbers of this rank
            while sum(map(len, parts)) < _AHEAD:
                size = self.batch_samples(step)
                per_rank = size // self.num_replicas
                assert size == per_rank * self.num_replicas and per_rank % self.micro_batch_size == 0
                parts.append(start + self.rank * per_rank + np.arange(per_rank))
                start, step = start + size, step + 1
            blocks = sample_index(np.concatenate(parts), samples=self.samples, seed=self.seed)
            yield from blocks.reshape(-1, self.micro_batch_size)[:remaining]
            remaining -= blocks.size // self.micro_batch_size


class HeldOutOrder(DistributedSampler):
    """This rank's batches of a held-out set in file order: rank r of W takes blocks r, r + W, r + 2W, ...

    All ranks have the same number of batches, all of one size (at most ``micro_batch_size``). No collective waits for a rank
    that has finished, and no shape changes. Excess blocks lie after the end of the stream.
    """

    def __init__(self, blocks: HeldOutBlocks, *, micro_batch_size: int, rank: int, world_size: int) -> None:
        super().__init__(blocks, num_replicas=world_size, rank=rank, shuffle=False)
        per_rank = -(-len(blocks) // world_size)
        self.batches = -(-per_rank // micro_batch_size)
        self.batch_size = -(-per_rank // self.batches)  # as even as possible, for the least padding

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[np.ndarray]:
        blocks = np.arange(self.batches * self.batch_size) * self.num_replicas + self.rank
        yield from blocks.reshape(self.batches, self.batch_size)


class ResumableLoader(DataLoader):
    """A loader without state: the trainer's step count determines its position (see ``GlobalOrder``).

    Lightning warns on resume about loaders without these two methods.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict

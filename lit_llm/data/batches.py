"""From a token stream to batches: the training blocks in global order, and the held-out blocks in file order.

Every batch is a dict of two int64 tensors (B, T): ``input_ids``, and ``targets``, where ``targets[b, t]`` is the token
after ``input_ids[b, t]``, or -100 where there is nothing to predict. The samplers yield the numbers of a whole
micro-batch, the datasets fetch it at once (``DataLoader(batch_size=None)``): there is no per-sample Python object and
nothing to collate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_llm.data.order import sample_index
from lit_llm.data.shards import TokenStream

IGNORE = -100
# Stands for "no end" where a length is due. Lightning sums lengths over ranks in int64, so it stays far below 2**63.
ENDLESS = 2**48
_AHEAD = 4096  # samples of the order computed at once: numpy's fixed cost per call is then below 0.1 us a sample


class _Blocks(Dataset):
    """Blocks of T inputs and T targets; block i begins at token i * T, so neighbours share one token."""

    def __init__(self, stream: TokenStream, *, block_size: int, vocab_size: int) -> None:
        self.stream, self.block_size, self.vocab_size = stream, block_size, vocab_size

    def _rows(self, blocks: np.ndarray) -> np.ndarray:
        """The T + 1 tokens of each block, (B, T + 1) int64, with -100 beyond the end of the stream."""
        rows = np.full((len(blocks), self.block_size + 1), IGNORE, dtype=np.int64)
        for row, block in zip(rows, blocks.tolist(), strict=True):
            start = block * self.block_size
            length = min(self.block_size + 1, len(self.stream) - start)
            if length > 1:  # a block needs a target; a lone last token is the target of the block before
                row[:length] = self.stream.read(start, length)
        # On the host, where it costs microseconds. In the embedding, an id beyond the table is undefined behaviour.
        if rows.max() >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0].tolist()
            raise self.stream.bad_token(int(blocks[row]) * self.block_size + column, self.vocab_size)
        return rows


class TrainBlocks(_Blocks):
    """The M = (N - 1) // T full blocks of a training stream of N tokens."""

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.block_size

    def __getitem__(self, blocks: np.ndarray) -> dict[str, Tensor]:
        rows = self._rows(blocks)  # (B, T + 1)
        return {
            "input_ids": torch.from_numpy(np.ascontiguousarray(rows[:, :-1])),  # (B, T)
            "targets": torch.from_numpy(np.ascontiguousarray(rows[:, 1:])),  # (B, T)
        }


class HeldOutBlocks(_Blocks):
    """All of a held-out stream: every token but the first is a target exactly once; the last block is padded.

    Blocks beyond the end are padding alone: they let every rank take part in the same number of batches.
    """

    def __len__(self) -> int:
        return -(-(len(self.stream) - 1) // self.block_size)

    def __getitem__(self, blocks: np.ndarray) -> dict[str, Tensor]:
        rows = self._rows(blocks)  # (B, T + 1)
        inputs = rows[:, :-1].copy()  # (B, T)
        inputs[inputs == IGNORE] = 0  # any valid id: nothing is predicted from it, and attention never looks ahead
        return {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(np.ascontiguousarray(rows[:, 1:]))}


class GlobalOrder(DistributedSampler):
    """This rank's micro-batches of the training order: arrays of block numbers (micro_batch_size,).

    Each step of the run reads the global samples that follow those of the step before; rank r of W takes the r-th of W
    equal contiguous parts, in order, cut in micro-batches. Iteration starts at the sample that ``consumed`` names at that
    moment, so a resumed run goes on where it was, whatever number of ranks, workers or micro-batches it had before.

    It is a ``DistributedSampler`` because that is what Lightning looks for before it injects its own shuffling one.

    Args:
        batch_samples: global samples in the step made after so many steps, a multiple of ``micro_batch_size * world_size``.
        step: optimizer steps made so far; asked whenever iteration starts.
        consumed: global samples consumed so far; asked whenever iteration starts.
        batches: micro-batches of the whole run (for ``len``), asked when needed.
        remaining: micro-batches still to come; asked whenever iteration starts.
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
            parts: list[np.ndarray] = []  # of successive steps: (G / W,) global sample numbers of this rank
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
    """This rank's batches of a held-out set in file order: rank r of W takes the blocks r, r + W, r + 2W, ...

    All batches of all ranks have one size (at most ``micro_batch_size``) and all ranks have as many of them, so that no
    collective waits for a rank that has none left and no shape ever changes. The excess lies beyond the last block.
    """

    def __init__(self, blocks: HeldOutBlocks, *, micro_batch_size: int, rank: int, world_size: int) -> None:
        super().__init__(blocks, num_replicas=world_size, rank=rank, shuffle=False)
        per_rank = -(-len(blocks) // world_size)
        self.batches = -(-per_rank // micro_batch_size)
        self.batch_size = -(-per_rank // self.batches)  # as even as it goes, for the least padding

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[np.ndarray]:
        own = np.arange(self.batches * self.batch_size) * self.num_replicas + self.rank
        yield from own.reshape(self.batches, self.batch_size)


class ResumableLoader(DataLoader):
    """A loader whose position is kept elsewhere: by the trainer's step count (see ``GlobalOrder``).

    Lightning warns on every resume about loaders without a state of their own; these two methods say that there is
    none.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict

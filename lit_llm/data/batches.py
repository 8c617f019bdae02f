"""The samplers and the DataLoader of token data. Training reads blocks in the global order, evaluation in file order.

A sampler yields the addresses of all blocks of a micro-batch at once. ``lit_llm.data.blocks`` defines blocks and addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, DistributedSampler

from lit_llm.callbacks import ignore_signals
from lit_llm.data.blocks import Blocks

# The length of an endless loader. Lightning sums lengths over ranks in int64, so it must stay far below 2**63.
ENDLESS = 2**48
_AHEAD = 4096  # samples whose addresses are computed in one call: numpy's cost per call is then below 0.1 us per sample


class GlobalOrder(DistributedSampler):
    """A sampler for training that yields, for each micro-batch of this rank in order, the addresses of its samples' blocks.

    The method ``locate`` of the data module ``data`` maps the number of each sample, counted over the run and all ranks, to an
    address: a block's number or, in a mixture, the numbers of a source and a block. Iteration starts with the samples of
    optimizer step ``data.step``, so a resumed run continues in the same place with any number of ranks or micro-batches.

    The base class is ``DistributedSampler`` because Lightning then keeps this sampler and does not inject one that shuffles.
    """

    def __init__(self, blocks: Blocks, data: Any, *, rank: int, world_size: int) -> None:
        super().__init__(blocks, num_replicas=world_size, rank=rank, shuffle=False)
        self.data = data

    def __len__(self) -> int:
        """The number of this rank's micro-batches in the whole run; 2**48 (``ENDLESS``) if the run has no last step."""
        steps = -1 if self.data.trainer is None else self.data.trainer.max_steps
        return ENDLESS if steps == -1 else self.data.samples.micro_batches_before(steps)

    def __iter__(self) -> Iterator[np.ndarray]:
        data, samples, step = self.data, self.data.samples, self.data.step
        remaining = len(self) - samples.micro_batches_before(step)
        while remaining > 0:
            parts: list[range] = []  # the samples of each of the next micro-batches
            while sum(map(len, parts)) < _AHEAD:
                parts += samples.of_rank(step, self.rank)
                step += 1
            addresses = data.locate(np.fromiter(chain.from_iterable(parts), np.int64))
            for addresses_of_one in np.split(addresses, np.cumsum([len(part) for part in parts[:-1]]))[:remaining]:
                data.refuse_changed_files()
                yield addresses_of_one
            remaining -= len(parts)


class HeldOutOrder(DistributedSampler):
    """A sampler of a held-out set in file order: rank r of W reads the blocks r, r + W, r + 2W, ...

    All ranks have the same number of batches, all of one size (at most ``micro_batch_size``), so no collective waits for a rank
    that has finished, and no shape changes. To fill up the last batches, the sampler also yields larger numbers than the last
    block's; for such numbers the dataset returns blocks of padding.
    """

    def __init__(self, blocks: Blocks, *, micro_batch_size: int, rank: int, world_size: int) -> None:
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
    """A DataLoader without state: the trainer's step count determines the position in the data (see ``GlobalOrder``).

    It has the methods ``state_dict`` and ``load_state_dict`` only because Lightning warns on resume about loaders without them.

    Args:
        order: the sampler, which yields the block addresses of a whole micro-batch at a time.
    """

    def __init__(self, blocks: Blocks, order: DistributedSampler, *, num_workers: int, pin_memory: bool) -> None:
        super().__init__(
            blocks,
            sampler=order,
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=ignore_signals,  # Ctrl-C and SLURM signal the process group; the main process stops its workers
            pin_memory=pin_memory,
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict

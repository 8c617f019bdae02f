"""The blocks of several sources as one dataset. Batches say which source each row is from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lit_llm.data.blocks import Blocks, Rows


class MixtureBlocks(Blocks):
    """Blocks with the address (source, block). A batch has ``sources`` too: (B,) int64, the number of each row's source.

    Args:
        blocks: a source's number → its blocks.
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
    """Held-out blocks of all sources, each with one number. Those after the end are padding.

    The sources alternate evenly, so that the first batches, which `limit_val_batches` leaves, have text of all of them.
    """

    def __init__(self, blocks: Mapping[int, Blocks]) -> None:
        super().__init__(blocks)
        sizes = list(map(len, self.blocks.values()))
        each = np.concatenate([np.arange(size) for size in sizes])  # (n,) block in its source
        order = np.argsort((each + 0.5) / np.repeat(sizes, sizes), kind="stable")
        self._addresses = np.stack([np.repeat(list(self.blocks), sizes), each], axis=1)[order]  # (n, 2)
        self._padding = list(self.blocks)[-1], sizes[-1]

    def __getitem__(self, blocks: np.ndarray) -> dict[str, Tensor]:
        return super().__getitem__(self.addresses(blocks))

    def addresses(self, blocks: np.ndarray) -> np.ndarray:
        """(source, block) of block numbers (n,): (n, 2). Blocks after the end lie after the end of the last source."""
        there = blocks < len(self._addresses)
        return np.where(there[:, None], self._addresses[np.where(there, blocks, 0)], self._padding)

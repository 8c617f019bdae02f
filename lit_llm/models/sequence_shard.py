"""Which positions a rank computes when ranks share each sequence (context parallelism).

Letters: n ranks, T positions, a multiple of `SequenceShard.multiple`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

ContextAttention = Literal["gather", "heads"]
"""Kinds of context parallelism. gather: each rank gathers all keys and values. heads: in attention, each rank has all positions
of a part of the heads."""


class SequenceShard(NamedTuple):
    """Record of how n ranks share each sequence: all load the same batch, and each rank computes T / n positions.

    With `kind` gather, the sequence has 2n chunks, and rank r has chunks r and 2n - 1 - r. A position attends to earlier
    positions, so late chunks cost more than early chunks, but each rank's two chunks together cost the same. With `kind` heads,
    rank r has chunk r of n chunks.
    """

    group: str
    """Name of the ranks' process group."""
    ranks: int
    rank: int
    kind: ContextAttention = "gather"

    @property
    def multiple(self) -> int:
        """The number of chunks of a sequence. The number of positions T must be a multiple of this number."""
        return self.ranks * len(self.chunks)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Numbers of the chunks of the sequence that this rank has, ascending."""
        return self.chunks_of(self.rank)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Numbers of the chunks of the sequence that the rank `rank` has, ascending."""
        return (rank, 2 * self.ranks - 1 - rank) if self.kind == "gather" else (rank,)

    @property
    def chunks_by_rank(self) -> list[int]:
        """Numbers of all chunks of the sequence: the chunks of rank 0, then the chunks of rank 1, and so on."""
        return [chunk for rank in range(self.ranks) for chunk in self.chunks_of(rank)]

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor with T positions along `dim`: T / n positions, in ascending order."""
        parts = x.chunk(self.multiple, dim)
        return torch.cat([parts[chunk] for chunk in self.chunks], dim)

"""All-to-all that gathers each sharded matrix on one rank, its owner, for Newton–Schulz, and scatters the update.

Shards travel along one mesh dimension after the other, the last dimension first: with tensor parallelism, within a machine
before between machines. Only process groups of the matrices' own mesh are used, so pipeline stages do not wait for each other.
Ranks with equal coordinates along the replicated dimensions are called a "row"; a row holds all shards of a matrix. So shards
travel only within the owner's row. Each rank of this row then broadcasts its shard of the update to its copies in other rows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from lit_llm.core._torch import box_at
from lit_llm.core.memory import MUON_BATCH_NUMEL
from lit_llm.optim.owners import owners, turns

Coordinate: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """Record of a distributed matrix: its shape (r, c), and one placement per mesh dimension."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]

    @lru_cache(maxsize=65536)  # noqa: B019  # by value: matrices of one shape share an entry
    def box(self, mesh_shape: tuple[int, ...], at: Coordinate) -> tuple[slice, ...]:
        """Return the slices (rows, columns) of the matrix that the rank at coordinate `at` of the mesh holds."""
        size, offset = box_at(self.shape, mesh_shape, at, self.placements)
        return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))

    def numel(self, mesh_shape: tuple[int, ...], at: Coordinate) -> int:
        """Return the number of the matrix's elements that the rank at coordinate `at` of the mesh holds."""
        rows, columns = self.box(mesh_shape, at)
        return (rows.stop - rows.start) * (columns.stop - columns.start)


@dataclass(frozen=True)
class _Hop:
    """Record of an all-to-all along one mesh dimension, which brings shards nearer to the ranks that own their matrices.

    `sent`, `received`: for each rank of `group`, the shards that this rank sends there, or receives, when it gathers matrices,
    each as (number of the matrix, coordinate of the rank that stores the shard).
    """

    group: dist.ProcessGroup
    sent: list[list[tuple[int, Coordinate]]]
    received: list[list[tuple[int, Coordinate]]]


class MatrixExchange:
    """Gathers each matrix's shards on one rank, its owner, which orthogonalises the matrix, and scatters the result.

    All ranks of the mesh must call the methods. A "row" is the ranks with equal coordinates along replicated mesh dimensions.

    Args:
        matrices: all matrices on the mesh. The number of a matrix is its index in this list.
        numbers: numbers of the matrices of this exchange.
        owners: for each matrix, the index of its owner among the ranks of the mesh.

    Attributes:
        rows: coordinates of a row → numbers of the matrices that ranks of this row own. Equal on all ranks.
        row: coordinates of this rank's row.
        mine: numbers of the matrices that ranks of this rank's row own.
    """

    def __init__(self, mesh: DeviceMesh, matrices: Sequence[Matrix], numbers: Sequence[int], owners: Sequence[int]) -> None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "only ranks of the mesh hold its parameters"
        self._mesh, self._matrices, self._at = mesh, matrices, tuple(coordinate)
        self._replicated = [
            d for d, placement in enumerate(matrices[0].placements) if isinstance(placement, Replicate) and mesh.size(d) > 1
        ]
        self._owner = {i: tuple(map(int, np.unravel_index(owners[i], tuple(mesh.shape)))) for i in numbers}
        by_row: dict[Coordinate, list[int]] = defaultdict(list)
        for i in numbers:
            by_row[self._row(self._owner[i])].append(i)
        self.rows = dict(sorted(by_row.items()))
        self.row = self._row(self._at)
        self.mine = self.rows.get(self.row, [])
        self._hops = self._plan_hops()

    def _row(self, at: Coordinate) -> Coordinate:
        return tuple(at[d] for d in self._replicated)

    def _plan_hops(self) -> list[_Hop]:
        shape, at, hops = tuple(self._mesh.shape), self._at, list[_Hop]()
        before: list[int] = []  # dimensions along which the parts have travelled
        for d in reversed(range(len(shape))):
            if d in self._replicated or shape[d] == 1:  # dimensions of one rank have no group
                continue
            # Before this hop a rank has all parts along `before`, of the matrices whose owner has the rank's coordinates there.
            near = [i for i in self.mine if all(self._owner[i][k] == at[k] for k in before)]
            sources = [range(shape[k]) if k in before else [at[k]] for k in range(len(shape))]
            sent, received = [], []
            for peer in range(shape[d]):
                sent.append([(i, s) for i in near if self._owner[i][d] == peer for s in itertools.product(*sources)])
                theirs = [[peer] if k == d else source for k, source in enumerate(sources)]
                received.append([(i, s) for i in near if self._owner[i][d] == at[d] for s in itertools.product(*theirs)])
            hops.append(_Hop(self._mesh.get_group(d), sent, received))
            before.append(d)
        return hops

    def gather(self, parts: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """Gather all shards of each matrix on its owner. Returns number → matrix (r, c), for the matrices that this rank owns.

        Args:
            parts: number → this rank's flat shard, for the matrices in `mine`. The dict is emptied, to free memory early.
            like: an empty tensor with the dtype and device of the shards, for ranks without shards.
        """
        flat_parts = {(i, self._at): parts.pop(i) for i in self.mine}
        for hop in self._hops:
            flat_parts = self._exchange(hop.group, hop.sent, hop.received, flat_parts, like)
        pieces: dict[int, list[tuple[Coordinate, Tensor]]] = defaultdict(list)
        for (i, source), piece in flat_parts.items():
            pieces[i].append((source, piece))
        whole = {}
        for i, placed in pieces.items():
            whole[i] = placed[0][1].new_empty(self._matrices[i].shape)
            for source, piece in placed:
                box = self._matrices[i].box(tuple(self._mesh.shape), source)
                target = whole[i][box]
                target.copy_(piece.view(target.shape))
        return whole

    def scatter(self, whole: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """Scatter whole matrices from their owners. Returns number → this rank's flat shard, for the matrices in `mine`.

        Args:
            whole: number → matrix, for the matrices that this rank owns. The dict is emptied.
            like: an empty tensor with the dtype and device of the matrices, for ranks without shards.
        """
        shape = tuple(self._mesh.shape)
        everywhere = [[self._at[d]] if d in self._replicated else range(n) for d, n in enumerate(shape)]
        flat_parts = {}
        for i in list(whole):
            matrix = whole.pop(i)
            for to in itertools.product(*everywhere):
                flat_parts[i, to] = matrix[self._matrices[i].box(shape, to)].flatten()
            del matrix
        for hop in reversed(self._hops):
            flat_parts = self._exchange(hop.group, hop.received, hop.sent, flat_parts, like)
        return {i: flat_parts[i, self._at] for i in self.mine}

    def share(self, row: Coordinate, parts: dict[int, Tensor], like: Tensor) -> list[Tensor]:
        """Broadcast the shards of the matrices `rows[row]` from that row to all rows. Returns this rank's shards, each flat.

        Args:
            parts: number → this rank's flat shard, for the matrices in `mine`. Shards of `rows[row]` are removed.
            like: an empty tensor with the dtype and device of the shards, for ranks of other rows.
        """
        own = [parts.pop(i) for i in self.rows[row]] if row == self.row else []
        if not self._replicated:
            return own
        sizes = [self._matrices[i].numel(tuple(self._mesh.shape), self._at) for i in self.rows[row]]
        buffer = torch.cat(own) if own else like.new_empty(sum(sizes))
        del own
        for step, d in enumerate(self._replicated):
            later = range(step + 1, len(self._replicated))
            if all(self._at[self._replicated[k]] == row[k] for k in later):
                dist.broadcast(buffer, group=self._mesh.get_group(d), group_src=row[step])
        return list(buffer.split(sizes))

    def to_all_ranks(self, vectors: dict[int, Tensor], device: torch.device) -> dict[int, Tensor]:
        """Send a vector per matrix from the matrices' owners to all ranks. Returns number → fp32 vector (r,) for all matrices.

        A collective: ranks add their vectors to the others' zeros. This is exact, so all ranks have the same bits.

        Args:
            vectors: number → vector (r,), for the matrices that this rank owns.
        """
        numbers = [i for row in self.rows.values() for i in row]
        sizes = [self._matrices[i].shape[0] for i in numbers]
        buffer = torch.zeros(sum(sizes), device=device)
        slices = dict(zip(numbers, buffer.split(sizes), strict=True))
        for i, vector in vectors.items():
            slices[i].copy_(vector)
        for d, n in enumerate(self._mesh.shape):
            if n > 1:
                dist.all_reduce(buffer, group=self._mesh.get_group(d))
        return slices

    def local_rows(self, i: int) -> slice:
        """Return the slice of rows of matrix `i` that this rank's shard covers, wholly or in part."""
        return self._matrices[i].box(tuple(self._mesh.shape), self._at)[0]

    def _exchange(
        self,
        group: dist.ProcessGroup,
        to: list[list[tuple[int, Coordinate]]],
        come: list[list[tuple[int, Coordinate]]],
        flat_parts: dict[tuple[int, Coordinate], Tensor],
        like: Tensor,
    ) -> dict[tuple[int, Coordinate], Tensor]:
        shape = tuple(self._mesh.shape)

        def sizes(keys: list[tuple[int, Coordinate]]) -> list[int]:
            return [self._matrices[i].numel(shape, source) for i, source in keys]

        arriving = [key for keys in come for key in keys]
        sent = torch.cat([like, *(flat_parts[key] for keys in to for key in keys)])  # `like` is empty
        flat_parts.clear()
        received = like.new_empty(sum(sizes(arriving)))
        if self.mine:  # without matrices, nothing travels in this row
            dist.all_to_all_single(
                received, sent, [sum(sizes(keys)) for keys in come], [sum(sizes(keys)) for keys in to], group=group
            )
        return dict(zip(arriving, received.split(sizes(arriving)), strict=True))


def exchanges_of(mesh: DeviceMesh, matrices: Sequence[Matrix]) -> list[MatrixExchange]:
    """Choose owners of matrices on one mesh, and turns. Return a `MatrixExchange` for the matrices of each turn.

    All matrices are replicated along the same dimensions of `mesh`."""
    chosen = owners([matrix.shape for matrix in matrices], mesh.size())
    sizes = [rows * columns for rows, columns in (matrix.shape for matrix in matrices)]
    return [MatrixExchange(mesh, matrices, numbers, chosen) for numbers in turns(sizes, chosen, MUON_BATCH_NUMEL)]

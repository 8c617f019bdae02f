"""What a step of MuonAdamW takes: FLOPs, work memory, and bytes between the owners of its matrices.

With a mesh, each matrix is whole on one rank of its pipeline stage (`lit_llm.optim.exchange`). The assignment is computed with
the optimizer's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from lit_llm.core.memory import MUON_BATCH_NUMEL

Shapes = tuple[tuple[int, ...], ...]


def flops(shapes: Shapes) -> float:
    """FLOPs of the iterations of one update."""
    from lit_llm.optim.owners import newton_schulz_flops  # the package imports torch

    return float(sum(newton_schulz_flops(rows, columns) for rows, columns in shapes))


def work_bytes(
    shapes: Shapes, parameter_bytes: int, iterate_bytes: int, *, shards: int, rows: int, cuda: bool, normuon: bool = False
) -> int:
    """Peak temporary memory of the step on the rank that needs most.

    Args:
        shapes: of all hidden matrices, whole.
        iterate_bytes: of an element in the iteration, and in transit.
        shards: ranks that share a matrix. 1 with `rows` 1: no mesh.
        rows: replicas of these.
        cuda: copies are kept until `found_inf` is applied.
        normuon: on a mesh, all ranks have a number (fp32) for each row of the matrices of a turn, before they get their parts.
    """
    p, w = parameter_bytes, iterate_bytes
    peak = 0
    for own, of_row, heights in _turns(shapes, shards, rows):
        squares = 4 * heights if normuon else 0
        part = sum(of_row) / shards  # elements of this rank's parts
        whole, largest = sum(math.prod(each) for each in own), max(own, key=math.prod)
        moments = [part * p * (2 if cuda else 1)]  # the momentum, and its copy
        if shards * rows == 1:
            sizes = [math.prod(shape) for shape in own]
            moments += [  # updates before a matrix, directions from it on
                sum(sizes[:i]) * w + sum(sizes[i:]) * p + _iterating(shape, w, cuda=cuda) for i, shape in enumerate(own)
            ]
        else:
            moments.append(part * (p + w if p != w else p))  # the directions, and as they are sent
            moments += [2 * part * w, (part + whole) * w, 2 * whole * w + squares]  # sending and receiving, there and back
            moments.append(whole * w + _iterating(largest, w, cuda=cuda))
            moments.append(part * w * (2 if rows > 1 else 1) + (part * p if cuda else 0) + squares)
        peak = max(peak, int(max(moments)))
    return peak


def _iterating(shape: tuple[int, ...], w: int, *, cuda: bool) -> int:
    """Two iterates, the Gram matrix and its polynomial; or, on a CPU, a narrow iterate and its copy in fp32 for the norm."""
    r, c = sorted(shape)
    return max(2 * (r * c + r * r) * w, 0 if cuda or w == 4 else r * c * (w + 4))


def traffic_bytes(
    shapes: Shapes, iterate_bytes: int, *, dimensions: Sequence[int], rows: int, normuon: bool = False
) -> dict[str, float]:
    """Bytes that a rank sends in a step, by collective: the mean of the ranks, which differ by the work that they own.

    Each rank's parts travel to the owners, along one dimension after the other, and back; then to the other replicas.

    Args:
        dimensions: sizes of the mesh dimensions that split matrices.
        rows: number of replicas.
        normuon: each row of a matrix has a number (fp32), which all ranks get.
    """
    size = sum(math.prod(shape) for shape in shapes) * iterate_bytes
    shards = math.prod(dimensions)
    found = {"all_to_all": 2 * size / (shards * rows) * sum((n - 1) / n for n in dimensions)}
    if rows > 1:
        found["broadcast"] = size / shards
    if normuon:
        found["all_reduce"] = sum(2 * (n - 1) / n for n in (*dimensions, rows)) * 4 * sum(shape[0] for shape in shapes)
    return {kind: sent for kind, sent in found.items() if sent}


@lru_cache(maxsize=256)
def _turns(shapes: Shapes, shards: int, rows: int) -> list[tuple[Shapes, tuple[int, ...], int]]:
    """For each turn and rank that owns something in it: shapes that it owns, elements of its row's matrices, rows of all."""
    from lit_llm.optim.owners import owners, turns

    sizes = [math.prod(shape) for shape in shapes]
    chosen = owners(shapes, shards * rows)
    found: dict[tuple[Shapes, tuple[int, ...], int], None] = {}
    for numbers in turns(sizes, chosen, MUON_BATCH_NUMEL):
        heights = sum(shapes[i][0] for i in numbers)
        for rank in {chosen[i] for i in numbers}:
            own = tuple(shapes[i] for i in numbers if chosen[i] == rank)
            found[own, tuple(sizes[i] for i in numbers if chosen[i] // shards == rank // shards), heights] = None
    return list(found)

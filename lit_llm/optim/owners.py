"""Decides which rank orthogonalises which of Muon's matrices, and in which turn. No torch: the planner uses this, too."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def steps_together(rows: int, columns: int, element_bytes: int) -> int:
    """Number of steps that `newton_schulz` applies at once: 3 in fp32 if one side is over twice the other in length, else 1."""
    return 3 if element_bytes == 4 and max(rows, columns) > 2 * min(rows, columns) else 1


def newton_schulz_flops(rows: int, columns: int, steps: int = 5, element_bytes: int = 2) -> int:
    """FLOPs of `newton_schulz` for one matrix, whose shorter side is r and longer side c.

    One or three steps are applied to the matrix at once (`steps_together`). Each application takes 2r²c (Gram matrix), 2r³ (its
    square) and 2r²c (product with the matrix). Each further step within an application takes 8r³.
    """
    r, c = sorted((rows, columns))
    applications = -(-steps // steps_together(r, c, element_bytes))
    return applications * (4 * r * r * c + 2 * r**3) + (steps - applications) * 8 * r**3


def owners(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[int]:
    """Return for each matrix the rank that owns, and so orthogonalises, this matrix.

    Matrices are assigned in the order of their FLOPs, the most first, each to the rank with the fewest FLOPs so far. Ties go to
    the matrix that comes first and to the lower rank, so every rank computes the same owners.
    """
    work = [newton_schulz_flops(rows, columns) for rows, columns in shapes]
    owner_of = [0] * len(shapes)
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    for i in sorted(range(len(shapes)), key=lambda i: -work[i]):
        load, owner_of[i] = loads[0]
        heapq.heapreplace(loads, (load + work[i], owner_of[i]))
    return owner_of


def turns(sizes: Sequence[int], owners: Sequence[int], limit: int) -> list[list[int]]:
    """Divide matrices into turns, in each of which owners work at the same time. Return the indices of each turn's matrices.

    In a turn, each owner works on one matrix, or on several with at most `limit` elements together.

    Args:
        sizes: number of elements of each matrix.
        owners: owner of each matrix.
    """
    schedule: list[list[int]] = []
    turn: dict[int, int] = {}  # current turn of each owner
    loads: dict[int, int] = {}  # elements of each owner in its turn
    for i, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        if owner in loads and loads[owner] + size > limit:
            turn[owner], loads[owner] = turn[owner] + 1, 0
        number = turn.setdefault(owner, 0)
        loads[owner] = loads.get(owner, 0) + size
        if number == len(schedule):
            schedule.append([])
        schedule[number].append(i)
    return schedule

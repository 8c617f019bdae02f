"""Which rank orthogonalises which matrix, and when. Without torch, so that the planner computes the same."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def steps_together(rows: int, columns: int, element_bytes: int) -> int:
    """Steps of the iteration that are applied to a matrix at once, see `newton_schulz`. More lose small directions."""
    return 3 if element_bytes == 4 and max(rows, columns) > 2 * min(rows, columns) else 1


def newton_schulz_flops(rows: int, columns: int, steps: int = 5, element_bytes: int = 2) -> int:
    """FLOPs of the iteration for r x c, r ≤ c, in elements of so many bytes.

    For each application to the matrix 2r²c (Gram matrix), 2r³ (its square) and 2r²c (the product); 8r³ for each further step
    within it.
    """
    r, c = sorted((rows, columns))
    applications = -(-steps // steps_together(r, c, element_bytes))
    return applications * (4 * r * r * c + 2 * r**3) + (steps - applications) * 8 * r**3


def owners(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[int]:
    """The owner of each matrix: the most work first, each to the rank with the least work so far.

    Ties go to the matrix that comes first and to the lower rank, so every rank computes the same.
    """
    work = [newton_schulz_flops(rows, columns) for rows, columns in shapes]
    found = [0] * len(shapes)
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    for i in sorted(range(len(shapes)), key=lambda i: -work[i]):
        load, found[i] = loads[0]
        heapq.heapreplace(loads, (load + work[i], found[i]))
    return found


def turns(sizes: Sequence[int], owners: Sequence[int], limit: int) -> list[list[int]]:
    """The matrices of each turn. In a turn, an owner has one matrix, or several of at most `limit` elements together.

    Args:
        sizes: elements of each matrix.
    """
    found: list[list[int]] = []
    turn: dict[int, int] = {}  # of each owner, so far
    held: dict[int, int] = {}  # elements of each owner in its turn
    for i, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        if owner in held and held[owner] + size > limit:
            turn[owner], held[owner] = turn[owner] + 1, 0
        number = turn.setdefault(owner, 0)
        held[owner] = held.get(owner, 0) + size
        if number == len(found):
            found.append([])
        found[number].append(i)
    return found

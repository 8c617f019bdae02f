"""Computes micro-batch sizes from batch sizes, and steps of a batch ramp. No torch: planner and data modules use this."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from functools import cache
from itertools import count
from typing import Protocol


class Pipeline(Hashable, Protocol):
    """Protocol of a pipeline. `runs(n)`: whether it can run n micro-batches in a step. `needs(n)`: the error message if not."""

    def runs(self, micro_batches: int) -> bool: ...

    def needs(self, micro_batches: int) -> str: ...


@cache
def micro_batch(batch: int, most: int | None, ranks: int, pipeline: Pipeline | None = None) -> int:
    """Number of sequences in a micro-batch: the largest number up to `most` that divides each rank's share of the batch.

    Args:
        batch: sequences per optimizer step over all ranks.
        most: `data.micro_batch_size`. None: no limit.
        ranks: number of data-parallel ranks.
        pipeline: a pipeline that must be able to run a step's number of micro-batches; None without a pipeline.

    Returns:
        The number of sequences; 0 if no number satisfies this.
    """
    share, rest = divmod(batch, ranks)
    sizes = range(0) if rest else range(min(most or share, share), 0, -1)
    return next((n for n in sizes if share % n == 0 and (pipeline is None or pipeline.runs(share // n))), 0)


def batch_problem(
    size: int, most: int | None, ranks: int, pipeline: Pipeline | None = None, *, length: int | None = None
) -> str | None:
    """A sentence on why ranks cannot divide a batch into micro-batches, with the nearest sizes that work. None if they can.

    Args:
        size: size of the batch over all ranks: in sequences, or in tokens if `length` is given.
        most, ranks, pipeline: largest micro-batch, data-parallel ranks, and pipeline, as in `micro_batch`.
        length: tokens per sequence, for a batch size of a batch ramp. None: `size` is the global batch size.
    """
    batch, cut = divmod(size, length or 1)
    if not cut and micro_batch(batch, most, ranks, pipeline):
        return None
    lower = batch - batch % ranks
    near = [
        next((n * (length or 1) for n in sizes if micro_batch(n, most, ranks, pipeline)), None)
        for sizes in (range(lower, 0, -ranks), count(lower + ranks, ranks))
    ]
    use = " or ".join(str(n) for n in near if n is not None)
    shared = f"{ranks} data-parallel rank{'s' if ranks > 1 else ''}"
    what, flag = f"global_batch_size {size}", "(--data.global_batch_size)"
    if length is not None:
        what, flag = f"batch_ramp: {size} tokens per batch", "tokens (--batch_ramp.tokens_per_batch)"
        shared = f"{length} tokens per sequence x {shared} = {length * ranks}"
    if cut or batch % ranks:
        return f"{what} is not a multiple of {shared}: use {use} {flag}."
    assert pipeline is not None  # without one, a micro-batch of one sequence works
    return f"{what}: {pipeline.needs(batch // ranks)}, or use {use} {flag}."


def small_note(batch: int, most: int | None, ranks: int, pipeline: Pipeline | None = None) -> list[str]:
    """A list with a sentence if micro-batches have less than half of `most` (`data.micro_batch_size`) sequences; else empty."""
    size = micro_batch(batch, most, ranks, pipeline)
    what = f"micro-batches of {size}, not data.micro_batch_size {most}: no larger part of a rank's {batch // ranks} sequences"
    return [] if most is None or 2 * size >= most else [f"{what} works (--data.global_batch_size)"]


# -- a batch ramp -----------------------------------------------------------------------------------------------------

Stages = tuple[tuple[int, int], ...]
"""The stages of a batch ramp. Each is (number of the stage's first optimizer step, from 0; sequences per step)."""


def sequences_before(stages: Stages, step: int) -> int:
    """Number of sequences that a batch ramp consumes in the first `step` optimizer steps."""
    ends = [first for first, _ in stages[1:]] + [step]
    return sum(max(0, min(end, step) - first) * size for (first, size), end in zip(stages, ends, strict=True))


def steps_for(stages: Stages, sequences: int) -> int:
    """Smallest number of optimizer steps in which a batch ramp consumes at least `sequences` sequences."""
    first, size = stages[-1]
    enough = first - (-sequences // size)
    if len(stages) == 1:  # of any size, where `range` has a limit
        return enough
    return bisect_left(range(enough), sequences, key=lambda step: sequences_before(stages, step))

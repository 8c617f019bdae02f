"""Sequences and steps under a batch-size ramp. A stage is (number of its first step, from 0; sequences per step)."""

from __future__ import annotations

from itertools import pairwise

Stages = tuple[tuple[int, int], ...]


def sequences_before(stages: Stages, step: int) -> int:
    """Sequences in the first `step` steps."""
    ends = [first for first, _ in stages[1:]] + [step]
    return sum(max(0, min(end, step) - first) * size for (first, size), end in zip(stages, ends, strict=True))


def steps_for(stages: Stages, sequences: int) -> int:
    """The fewest steps that consume at least `sequences` sequences."""
    remaining = sequences
    for (first, size), (end, _) in pairwise(stages):
        if remaining <= (end - first) * size:
            return first - (-remaining // size)
        remaining -= (end - first) * size
    first, size = stages[-1]
    return first - (-remaining // size)

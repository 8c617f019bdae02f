"""What a plan knows of the data: its size, the stages of a batch ramp, and what a mixture draws from each source.

A stage of a batch ramp is (number of its first step, from 0; sequences per step).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

Stages = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlannedSource:
    """A source in a phase."""

    name: str
    sequences: int
    epochs: float
    """Passes over the source from the start of the run to the end of the phase."""
    max_epochs: float | None


@dataclass(frozen=True)
class PlannedPhase:
    """A phase with constant weights."""

    end: int
    """Sequences of the run at its end."""
    sources: tuple[PlannedSource, ...]
    period: int
    """Sequences after which the shares are exact, again and again."""
    largest_deviation: float
    """Sequences that a source can be away from its share in between."""


Phases = tuple[PlannedPhase, ...]


@dataclass(frozen=True)
class DataFacts:
    """Size of the dataset in tokens. `origin` says how it is known: "counted …", "estimated …", or "unknown" (sizes None).

    `phases`: what a mixture draws from its sources. `sequences`: of one epoch of packed documents; None: unknown, or not
    packed. `packing`: what packing does to the documents.
    """

    train_tokens: int | None = None
    val_tokens: int | None = None
    origin: str = "unknown"
    bytes_per_token: int = 2
    phases: Phases = ()
    sequences: int | None = None
    packing: str = ""


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

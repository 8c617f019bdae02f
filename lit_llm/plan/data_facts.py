"""What a plan knows of the data: its size, the stages of a batch ramp, and what a mixture draws from each source.

A stage of a batch ramp is (number of its first step, from 0; sequences per step).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

Stages = tuple[tuple[int, int], ...]
HEADER = ("phase", "source", "share", "tokens", "epochs by its end", "max_epochs")
MANY_EPOCHS = 4


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


def rows(phases: Phases, stages: Stages, length: int, total: int) -> list[tuple[str, ...]]:
    """The table under `HEADER`.

    Args:
        stages: of the batch ramp.
        length: tokens of a sequence.
        total: sequences of the run.
    """
    found: list[tuple[str, ...]] = []
    for phase in phases:
        sequences = sum(source.sequences for source in phase.sources)
        for i, source in enumerate(phase.sources):
            end = f"to step {steps_for(stages, phase.end):,} ({100 * phase.end / total:.3g} %)" if i == 0 else ""
            share = f"{100 * source.sequences / sequences:.3g} %"
            cap = "" if source.max_epochs is None else f"{source.max_epochs:g}"
            found.append((end, source.name, share, f"{source.sequences * length:,}", f"{source.epochs:.3g}", cap))
    return found


def repeated(phases: Phases) -> list[str]:
    """Such as "code 7.2 epochs", for each source that the run reads more often than repetition helps."""
    last = {source.name: source.epochs for phase in phases for source in phase.sources}
    return [f"{name} {epochs:.3g} epochs" for name, epochs in last.items() if epochs > MANY_EPOCHS]


def uneven(phases: Phases, global_batch: int) -> str:
    """A sentence for the phase whose shares can be furthest off, if that is more than a step of ``global_batch`` sequences."""
    worst = max(phases, key=lambda phase: phase.largest_deviation, default=None)
    if worst is None or worst.largest_deviation <= global_batch:
        return ""
    return (
        f"shares of phase {phases.index(worst) + 1} are exact every {worst.period:,} sequences, and in between up to "
        f"{worst.largest_deviation:,.0f} sequences off, {worst.largest_deviation / global_batch:.3g} steps: round the weights"
    )

"""What a mixture draws from each source, by phase: plain numbers, and their table."""

from __future__ import annotations

from dataclasses import dataclass

from lit_llm.plan.ramp import Stages, steps_for

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

"""Runs in the order of their losses, and the figures of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lit_llm.core.number_text import count, duration, size
from lit_llm.reporting.run_curves import TOKENS, RunCurves
from lit_llm.reporting.summary import short_cost

BITS, VALIDATION, TRAINING = "val/bits_per_byte", "val/loss", "train/loss"


class RankedRun(NamedTuple):
    """A run in the ranking. `value`: the last one of the tag. None: it has none, or none that is finite, and no place."""

    run: RunCurves
    value: float | None


def ranked(runs: Sequence[RunCurves]) -> tuple[str | None, list[RankedRun]]:
    """(the tag by which runs are ordered, the runs by it, the lowest first, then those without a place).

    Bits per byte, if each run with a validation loss has them: runs with different tokenizers can be compared by nothing else.
    Else the validation loss; if no run has one, the training loss.
    """
    having = {tag: {run.name for run in runs if run.last(tag) is not None} for tag in (BITS, VALIDATION, TRAINING)}
    if having[BITS] and having[BITS] >= having[VALIDATION]:
        tag: str | None = BITS
    else:
        tag = next((tag for tag in (VALIDATION, TRAINING) if having[tag]), None)
    places = []
    for run in runs:
        value = None if tag is None or diverged(run) else run.last(tag)
        places.append(RankedRun(run, value if value is not None and math.isfinite(value) else None))
    return tag, sorted(places, key=lambda place: math.inf if place.value is None else place.value)


def diverged(run: RunCurves) -> bool:
    """Whether the last training loss is not finite."""
    loss = run.last(TRAINING)
    return loss is not None and not math.isfinite(loss)


def last_step(run: RunCurves) -> int | None:
    """The step after which its settings end it; None if they do not say."""
    steps = run.run.setting("trainer.max_steps")
    return steps if isinstance(steps, int) and steps > 0 else None


def planned_passes(run: RunCurves) -> float | None:
    """The passes over the training data after which its settings end it; None if they do not say."""
    epochs, limit = run.run.setting("trainer.max_epochs"), run.run.setting("trainer.limit_train_batches")
    return epochs if isinstance(epochs, int) and epochs > 0 and limit in (None, 1.0) and limit is not True else None


def passes(run: RunCurves) -> tuple[float, float] | None:
    """(passes over the training data that the logged tokens make, at most, with what each pass drops at its end).

    A pass drops less than a batch of a step, and less than a row of it. None: tokens or the size of the data were not logged.
    """
    size, tokens = run.last("setup/train_tokens"), run.series(TOKENS)
    if not size or not tokens.steps or not tokens.steps[-1]:
        return None
    made = tokens.values[-1] / size
    dropped = 2 * tokens.values[-1] / tokens.steps[-1] / size
    return made, made / (1 - dropped) if dropped < 1 else math.inf


def figures(run: RunCurves) -> dict[str, str]:
    """The most important figures, by name. "–" where a run has none."""

    def shown(tag: str, text: Callable[[float], str]) -> str:
        value = run.last(tag)
        return "–" if value is None else text(value) if math.isfinite(value) else str(value)

    steps = last_step(run)
    peak = max(run.series("memory/peak_gb").values, default=None)  # each launch counts from zero
    return {
        "validation loss": shown(VALIDATION, lambda v: f"{v:.4f}"),
        "bits per byte": shown(BITS, lambda v: f"{v:.4f}"),
        "training loss": shown(TRAINING, lambda v: f"{v:.4f}"),
        "steps": f"{run.step:,}" if steps is None else f"{run.step:,} of {steps:,}",
        "tokens": shown(TOKENS, count),
        "time": duration(run.seconds),
        "tokens per second": shown("throughput/tokens_per_second", count),
        "peak memory": "–" if peak is None else size(peak * 1e9).partition(" (")[0],
        "cost": short_cost(run.launches) or "–",
    }

"""The learning-rate schedule as phases and as a sparkline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Phase:
    """One phase of a run: its optimizer steps and tokens."""

    name: str
    steps: int
    tokens: int


def phases(
    kind: str,
    *,
    steps: int,
    warmup_steps: int,
    total_steps: int | None,
    decay_steps: int,
    tokens_before: Callable[[int], int],
) -> list[Phase]:
    """The phases warmup, stable (at the peak), decay and constant (at the final rate). Empty phases are left out.

    Args:
        kind: class name of the schedule. WSD decays at its end, Constant never, the others from the end of warmup.
        steps: optimizer steps of the run.
        total_steps: the step that reaches the final rate, within or after the run. None: the last step.
        decay_steps: for WSD, the length of the decay that ends at `total_steps`.
        tokens_before: the number of tokens in the first n steps, as a function of n.
    """
    end = steps if total_steps is None else total_steps
    peak_until = {"WSD": end - decay_steps, "Constant": steps}.get(kind, warmup_steps)
    ends = (("warmup", warmup_steps), ("stable", peak_until), ("decay", end), ("constant", steps))
    found, begin = [], 0
    for name, until in ends:
        until = min(max(begin, until), steps)
        if until > begin:
            found.append(Phase(name, until - begin, tokens_before(until) - tokens_before(begin)))
        begin = until
    return found


def sparkline(rate: Callable[[int], float], total_steps: int, width: int = 40) -> str:
    """`rate` as bars at `width` evenly spaced steps. The tallest bar is the peak."""
    width = min(width, total_steps)
    values = [rate(1 + round(i * (total_steps - 1) / max(1, width - 1))) for i in range(width)]
    top = max(values) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)

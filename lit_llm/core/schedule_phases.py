"""Finds the phases of any learning-rate schedule (warmup, stable, decay, constant) from the schedule's rates alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Phase:
    """Record of a phase of a learning-rate schedule: name, number of optimizer steps, and number of tokens in these steps."""

    name: str
    steps: int
    tokens: int


_SAMPLES = 2048
_MOST_PHASES = 12
"""`phases` returns a schedule with more phases than this number as one phase, "varies"."""


def phases(rate: Callable[[int], float], steps: int, tokens_before: Callable[[int], int]) -> list[Phase]:
    """A schedule's phases in time order: warmup (the rate rises), stable (at the peak), decay (falls), constant (below it).

    More than 12 phases are returned as one, "varies". Ends of phases are exact in a run of up to 2,048 steps. A longer run is
    sampled: a phase between two samples may be missed.

    Args:
        rate: number of an optimizer step, from 1 → learning rate divided by the peak.
        steps: number of optimizer steps of the run.
        tokens_before: n → number of tokens in the first n steps.
    """

    def name(step: int) -> str:
        now = rate(step)
        before = rate(step - 1) if step > 1 else 1.0
        if step == 1 and steps > 1 and rate(2) >= now:
            before = now if rate(2) == now else 0.0
        return "warmup" if now > before else "decay" if now < before else "stable" if now == 1.0 else "constant"

    ends, step = [0], 1
    for until in (max(1, steps * sample // _SAMPLES) for sample in range(1, _SAMPLES + 1)):
        while (now := name(step)) != name(until) and len(ends) <= _MOST_PHASES:
            step += bisect_left(range(step, until), True, key=lambda other: name(other) != now)
            ends.append(step - 1)
        step = until
    if len(ends) > _MOST_PHASES:
        return [Phase("varies", steps, tokens_before(steps))]
    return [
        Phase(name(last), last - begin, tokens_before(last) - tokens_before(begin)) for begin, last in pairwise([*ends, steps])
    ]

"""The learning-rate schedule as phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One phase of a run: its optimizer steps and tokens."""

    name: str
    steps: int
    tokens: int


_SAMPLES = 2048
_MOST = 12
"""Phases beyond which a schedule is one that varies."""


def phases(rate: Callable[[int], float], steps: int, tokens_before: Callable[[int], int]) -> list[Phase]:
    """The phases warmup (the rate rises), stable (at the peak), decay (it falls) and constant (below the peak).

    Their ends are exact in a run of up to _SAMPLES steps. In a longer one, a phase between two samples may be missed.

    Args:
        rate: of an optimizer step 1, 2, …, with a peak of 1.
        tokens_before: the number of tokens in the first n steps, as a function of n.
    """

    def name(step: int) -> str:
        now = rate(step)
        before = rate(step - 1) if step > 1 else 1.0
        if step == 1 and steps > 1 and rate(2) >= now:
            before = now if rate(2) == now else 0.0
        return "warmup" if now > before else "decay" if now < before else "stable" if now == 1.0 else "constant"

    found: list[Phase] = []
    begin, step = 0, 1

    def end_phase(last: int) -> None:
        nonlocal begin
        found.append(Phase(name(last), last - begin, tokens_before(last) - tokens_before(begin)))
        begin = last

    for sample in range(1, _SAMPLES + 1):
        until = max(1, steps * sample // _SAMPLES)
        while name(step) != name(until) and len(found) <= _MOST:
            same, other = step, until
            while other - same > 1:
                middle = (same + other) // 2
                same, other = (middle, other) if name(middle) == name(step) else (same, middle)
            end_phase(same)
            step = other
        step = until
    end_phase(steps)
    return found if len(found) <= _MOST else [Phase("varies", steps, tokens_before(steps))]

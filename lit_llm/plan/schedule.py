"""The learning-rate schedule as phases, and drawn in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Phase:
    """Part of a run: optimizer steps and tokens."""

    name: str
    steps: int
    tokens: int


def phases(kind: str, *, total_steps: int, warmup_steps: int, decay_steps: int, tokens_per_step: int) -> list[Phase]:
    """Warmup, stable and decay of a schedule; those of no steps are left out.

    Args:
        kind: the schedule's class name: WSD decays at the end, Constant never, the others from the end of warmup on.
        decay_steps: of WSD.
    """
    warmup = min(warmup_steps, total_steps)
    decay = min(decay_steps, total_steps - warmup) if kind == "WSD" else 0 if kind == "Constant" else total_steps - warmup
    parts = (("warmup", warmup), ("stable", total_steps - warmup - decay), ("decay", decay))
    return [Phase(name, steps, steps * tokens_per_step) for name, steps in parts if steps]


def sparkline(rate: Callable[[int], float], total_steps: int, width: int = 40) -> str:
    """`rate` at `width` steps from the first to the last, as bars; the tallest is the peak."""
    width = min(width, total_steps)
    values = [rate(1 + round(i * (total_steps - 1) / max(1, width - 1))) for i in range(width)]
    top = max(values) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)

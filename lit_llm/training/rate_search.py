"""Finds a learning rate from numbers: the start from a sweep, then the best rate among a few short runs.

A sweep raises the rate from step to step (Smith 2017, arXiv 1506.01186, section 3.3). It shows where training breaks, not
which rate ends lowest: each rate is used for one step, so the loss still falls at rates that are too high for a whole run.
Its result is therefore only the start of a search. The search compares short runs whose rates differ by factors of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SMOOTHING = 0.8
"""Weight of the past in the exponential average of a sweep's losses."""
BELOW_EDGE = 4.0
"""The search starts at the sweep's edge divided by this factor."""
HORIZON_POWER = -0.32
"""The best rate is proportional to this power of the tokens. Bjorck et al. 2024 (arXiv 2409.19913) fit it to AdamW runs."""
FARTHEST = 24
"""Largest exponent of two in a search, either way: the range of a sweep, so that a wrong start does not end the search."""


@dataclass(frozen=True)
class Sweep:
    """Losses of steps at growing rates."""

    rates: list[float]
    losses: list[float]

    @property
    def smoothed(self) -> list[float]:
        """The exponential average of the losses, without a bias towards the first loss. Ends before a NaN or infinity."""
        return smooth(self.losses)

    @property
    def edge(self) -> float:
        """The rate of the lowest smoothed loss: above it, steps do more harm than good."""
        smoothed = self.smoothed
        return self.rates[smoothed.index(min(smoothed))] if smoothed else self.rates[0]

    @property
    def start(self) -> float:
        """The rate at which the search starts."""
        return self.edge / BELOW_EDGE


def smooth(losses: Sequence[float], weight: float = SMOOTHING) -> list[float]:
    """Exponential average of each loss and its predecessors: sum of w^i · loss / sum of w^i. Ends before a NaN or infinity."""
    averages: list[float] = []
    total = count = 0.0
    for loss in losses:
        if not math.isfinite(loss):
            break
        total, count = weight * total + loss, weight * count + 1
        averages.append(total / count)
    return averages


def without_batches(losses: Sequence[float], at_first: Sequence[float]) -> list[float]:
    """Losses as if all batches were equally hard: each minus its batch's loss in `at_first`, plus the mean of `at_first`.

    Args:
        at_first: losses of the same batches with the starting weights; at least as many as `losses`.
    """
    mean = sum(at_first) / len(at_first)
    return [loss - first + mean for loss, first in zip(losses, at_first, strict=False)]


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether a sweep can end: a loss is not finite, or the smoothed loss has risen again, by half of its fall and by 5 %."""
    smoothed = smooth(losses)
    if len(smoothed) < len(losses):
        return True
    if not smoothed:
        return False
    lowest = min(smoothed)
    return smoothed[-1] > lowest + max(0.5 * (smoothed[0] - lowest), 0.05 * lowest)


def swept_rates(low: float, high: float, steps: int) -> list[float]:
    """`steps` rates from `low` to `high`, with a constant factor between neighbours."""
    return [low * (high / low) ** (i / (steps - 1)) for i in range(steps)]


def search(loss_at: Callable[[int], float], *, first: int = 0, stride: int = 2) -> dict[int, float]:
    """Search the power of two with the lowest loss. Returns all measured losses by exponent, also both neighbours of the best.

    The search walks downhill in steps of `stride` exponents, then halves the stride, down to 1.

    Args:
        loss_at: measures the loss at an exponent; infinity or NaN if training breaks.
        first: the exponent where the search starts.
    """
    losses: dict[int, float] = {}
    missing = [first]
    while stride >= 1:
        if missing:
            loss = loss_at(missing[0])
            losses[missing[0]] = loss if math.isfinite(loss) else math.inf
        else:
            stride //= 2
        best = lowest(losses)
        missing = [e for e in (best - stride, best + stride) if e not in losses and abs(e) <= FARTHEST]
    return losses


def lowest(losses: dict[int, float]) -> int:
    """The exponent of the lowest loss. Among equal losses the lowest exponent: if all rates break, lower ones come next."""
    return min(losses, key=lambda exponent: (losses[exponent], exponent))


def vertex(losses: dict[int, float]) -> float:
    """The exponent at the lowest point of the parabola through the lowest loss and its neighbours.

    It is the exponent of the lowest loss if that loss lacks a finite neighbour.
    """
    best = lowest(losses)
    left, middle, right = (losses.get(best + i, math.inf) for i in (-1, 0, 1))
    curvature = left - 2 * middle + right
    if not (math.isfinite(curvature) and curvature > 0):
        return float(best)
    return best + 0.5 * (left - right) / curvature  # within half a step, because the middle is the lowest


def horizon_factor(short: int, whole: int) -> float:
    """The best rate of a run of `whole` steps over that of a run of `short` steps with the same batch."""
    return (whole / short) ** HORIZON_POWER


@dataclass(frozen=True)
class FoundRates:
    """The result of a search. The dicts are by the optimizer's option for the rate, such as lr.

    Attributes:
        recipe: the recipe's rates.
        rates: the suggested rates.
        by_seed: the rate that each seed suggests.
        sweeps: the sweep of each rate.
        probes: for each seed, the loss of each short run by its rate.
        probe_steps: optimizer steps of a short run.
        steps: optimizer steps of all sweeps and short runs.
        factor: best rate of the whole run / best rate of a short run. `rates` and `by_seed` are multiplied by it already.
    """

    recipe: dict[str, float]
    rates: dict[str, float]
    by_seed: dict[str, list[float]]
    sweeps: dict[str, Sweep]
    probes: dict[str, list[dict[float, float]]]
    probe_steps: int
    steps: int
    factor: float

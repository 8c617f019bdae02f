"""The arithmetic of `find-lr`: the rate at which to start, from a sweep, then the search among rates of a few short runs.

A sweep is a run that raises the rate from step to step (Smith 2017, arXiv 1506.01186, section 3.3). It shows where training
breaks, not which rate gives the lowest final loss: each rate is used for one step, so the loss still falls at rates that are
too high for a whole run. The search therefore only starts there, and compares short runs whose rates differ by factors of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SMOOTHING = 0.8
"""Weight of earlier losses in the exponential average of a sweep's losses; a step's own loss has 1 minus this weight."""
BELOW_EDGE = 4.0
"""The search starts at `Sweep.edge`, the rate with the lowest smoothed loss, divided by this factor."""
HORIZON_POWER = -0.32
"""The best rate is proportional to (tokens of the run)^this. Bjorck et al. 2024 (arXiv 2409.19913) fitted it to AdamW runs."""
FARTHEST = 24
"""`search` tries exponents from -FARTHEST to FARTHEST only. That is as wide as a sweep, in case of a wrong start."""


@dataclass(frozen=True)
class Sweep:
    """Record of a run whose rate grows from step to step: `losses[i]` is the loss, in nats, of the step with `rates[i]`."""

    rates: list[float]
    losses: list[float]

    @property
    def smoothed(self) -> list[float]:
        """The exponential averages of the losses (`smooth`), one per step, up to the first NaN or infinity."""
        return smooth(self.losses)

    @property
    def edge(self) -> float:
        """The rate of the step with the lowest smoothed loss: after steps with higher rates, the smoothed loss is higher."""
        smoothed = self.smoothed
        return self.rates[smoothed.index(min(smoothed))] if smoothed else self.rates[0]

    @property
    def start(self) -> float:
        """The rate at which the search starts: `edge` / `BELOW_EDGE`."""
        return self.edge / BELOW_EDGE


def smooth(losses: Sequence[float], weight: float = SMOOTHING) -> list[float]:
    """Return for each loss the average Σ w^i · loss_(t-i) / Σ w^i of this and all earlier losses, w = `weight`. Ends before a
    NaN or infinity."""
    averages: list[float] = []
    total = count = 0.0
    for loss in losses:
        if not math.isfinite(loss):
            break
        total, count = weight * total + loss, weight * count + 1
        averages.append(total / count)
    return averages


def without_batches(losses: Sequence[float], at_first: Sequence[float]) -> list[float]:
    """Losses without differences between batches: each minus its batch's loss in `at_first`, plus the mean of `at_first`.

    Args:
        at_first: losses of the same batches with the weights at the start; at least as many as `losses`.
    """
    mean = sum(at_first) / len(at_first)
    return [loss - first + mean for loss, first in zip(losses, at_first, strict=False)]


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether a sweep can end: a loss is not finite, or the smoothed loss exceeds its minimum by half its fall and by 5 %."""
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
    """Search the exponent e whose rate, 2^e times a start, has the lowest loss. Returns exponent → loss for all measured ones.

    The search moves to lower losses by `stride` exponents, then halves the stride, down to 1. Both neighbours of the best
    exponent are measured, unless one is beyond ±`FARTHEST`.

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
    """The exponent with the lowest loss; among equal losses, the lowest exponent, so that a search then tries lower rates."""
    return min(losses, key=lambda exponent: (losses[exponent], exponent))


def vertex(losses: dict[int, float]) -> float:
    """The exponent, a fraction, at the minimum of the parabola through the lowest loss and the losses at exponents ±1 from it.

    If one of these two losses is missing or infinite, the exponent of the lowest loss.
    """
    best = lowest(losses)
    left, middle, right = (losses.get(best + i, math.inf) for i in (-1, 0, 1))
    curvature = left - 2 * middle + right
    if not (math.isfinite(curvature) and curvature > 0):
        return float(best)
    return best + 0.5 * (left - right) / curvature  # within half a step, because the middle is the lowest


def horizon_factor(short: int, whole: int) -> float:
    """(best rate of a run of `whole` steps) / (best rate of a run of `short` steps), for the same batch size."""
    return (whole / short) ** HORIZON_POWER


@dataclass(frozen=True)
class FoundRates:
    """Record of the result of `find-lr`. The keys of the dicts are the optimizer's options for rates, such as lr.

    Attributes:
        recipe: the recipe's rates.
        rates: the suggested rates.
        by_seed: the suggested rate of each seed.
        sweeps: the sweep of each option.
        probes: for each seed: rate → loss of the short run with this rate.
        probe_steps: optimizer steps of a short run.
        steps: optimizer steps of all sweeps and short runs.
        factor: best rate of the whole run / best rate of a short run. `rates` and `by_seed` include this factor.
    """

    recipe: dict[str, float]
    rates: dict[str, float]
    by_seed: dict[str, list[float]]
    sweeps: dict[str, Sweep]
    probes: dict[str, list[dict[float, float]]]
    probe_steps: int
    steps: int
    factor: float

"""The order of a mixture: the source and block of every global sample number, as a pure function.

A run consists of phases. In a phase, each source s has a quota q_s, and samples come in periods of P samples, the sum of the
quotas. In each period, source s has exactly q_s samples, at random places. The samples of a source are numbered 0, 1, 2, ...
through the whole run. In each epoch of a source, its blocks are permuted anew by (seed, name of the source, epoch), so their
order does not depend on the other sources.

The only state of a run is the list of its phases, because a continued run may have other phases.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lit_llm.core.errors import UserError
from lit_llm.data.order import permute

MAX_PERIOD = 10_000
"""The largest sum of quotas, which is the length of a period in samples. Weights in percent with two decimals need no more."""
_AT_ONCE = 2**20  # the number of places of periods that are computed in one call, which takes about 50 MB


@dataclass(frozen=True)
class SourceDraws:
    """Record of how much a phase of a mixture reads of a source: the numbers of samples and tokens.

    `epochs`: passes over the source from the run's start to the phase's end. `max_epochs`: the most passes; None: no limit.
    """

    samples: int
    tokens: int
    epochs: float
    max_epochs: float | None


@dataclass(frozen=True)
class PhaseDraws:
    """Record of how much a phase of a mixture reads of each source.

    Attributes:
        end: the number of samples that the run has read at the end of the phase.
        period: the number of samples (P) after which the shares of the sources are exact again.
        largest_deviation: the most samples by which a source can be ahead of its share, or behind, within a period.
        sources: source → how much the phase reads of the source, for all sources, also those of weight 0.
    """

    end: int
    period: int
    largest_deviation: float
    sources: dict[str, SourceDraws]


class Phase(NamedTuple):
    """Record of a part of a mixture's run during which the weights of the sources stay the same."""

    end: int
    """The number of samples that the run has read at the end of the phase. A phase starts at the end of the previous phase."""
    quotas: dict[str, int]
    """Source → the number of its samples in each period of the phase, at least 1. Their greatest common divisor is 1."""

    @property
    def period(self) -> int:
        """The number of samples in a period of the phase, P: the sum of the quotas."""
        return sum(self.quotas.values())

    @property
    def largest_deviation(self) -> float:
        """The most samples by which a source can be ahead of its share, or behind, inside a period: max q (P - q) / P."""
        return max(quota * (self.period - quota) / self.period for quota in self.quotas.values())


def smallest_quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """Source → quota, its number of samples in a period: the smallest whole numbers in the ratio of ``weights``.

    Sources of weight 0 are left out.

    A weight counts as the decimal number that the user wrote: 0.1 is exactly one tenth.

    Raises:
        UserError: a weight is not from 0 to 100, the sum is neither 1 nor 100, or the period is longer than ``MAX_PERIOD``.
    """
    for name, weight in weights.items():
        if not 0 <= weight <= 100:
            raise UserError(f"The weight of {name} is {weight}, but must be from 0 to 100")
    exact = {name: Fraction(str(weight)) for name, weight in weights.items() if weight}
    total = sum(exact.values())
    if total not in (1, 100):
        raise UserError(f"The weights sum to {_decimal(Fraction(total))}, but must sum to 100 or to 1")
    denominator = math.lcm(*(weight.denominator for weight in exact.values()))
    scaled = {name: int(weight * denominator) for name, weight in exact.items()}
    divisor = math.gcd(*scaled.values())
    quotas = {name: quota // divisor for name, quota in scaled.items()}
    if sum(quotas.values()) > MAX_PERIOD:
        rounded = ", ".join(f"{name}: {_decimal(weight * total)}" for name, weight in _hundredths(exact, total).items())
        raise UserError(
            f"The weights are exact only over {sum(quotas.values()):,} samples, but at most {MAX_PERIOD:,} are allowed: "
            f"round them to hundredths of a percent, as {rounded}"
        )
    return quotas


def _hundredths(weights: dict[str, Fraction], total: Fraction | int) -> dict[str, Fraction]:
    """Source → its weight / ``total``, rounded to 0.01 %, at least 0.01 %. The largest share is changed to make the sum 1."""
    parts = {name: max(1, round(weight / total * MAX_PERIOD)) for name, weight in weights.items()}
    parts[max(parts, key=parts.__getitem__)] += MAX_PERIOD - sum(parts.values())
    return {name: Fraction(part, MAX_PERIOD) for name, part in parts.items()}


def phases_of(untils: Sequence[float], quotas: Sequence[dict[str, int]], total: int) -> list[Phase]:
    """Phases with the quotas ``quotas`` that end at the fractions ``untils`` of ``total`` samples, rounded to whole samples.

    Neighbouring phases with the same quotas become one phase, and phases without a sample are left out.
    """
    ends = [round(Fraction(str(until)) * total) for until in untils]
    return _joined(Phase(end, each) for end, each in zip(ends, quotas, strict=True))


def continued(saved: Sequence[Phase], configured: Sequence[Phase], consumed: int) -> list[Phase]:
    """The phases of a continued run: the checkpoint's phases up to sample ``consumed``, then the phases of the settings.

    If the weights before and after ``consumed`` are the same, the phase goes on, perhaps to another end. Else a new one starts.
    """
    past = [Phase(min(phase.end, consumed), phase.quotas) for phase in saved]
    if past and past[-1].end < consumed:  # samples after the last phase have its weights
        past[-1] = Phase(consumed, past[-1].quotas)
    return _joined([*past, *(phase for phase in configured if phase.end > consumed)])


def _joined(phases: Iterable[Phase]) -> list[Phase]:
    kept: list[Phase] = []
    for phase in phases:
        if phase.end <= (kept[-1].end if kept else 0):
            continue
        if kept and kept[-1].quotas == phase.quotas:
            kept.pop()
        kept.append(phase)
    return kept


class MixtureOrder:
    """Finds the source and the block of each sample of a run on a mixture.

    After n samples of a phase with period P, a source with quota q has at most q (P - q) / P samples more or fewer than its
    share n q / P. The difference is 0 after every P samples.

    Args:
        phases: at least one phase. The last phase goes on after its end.
        sizes: source → its number of blocks. A source may be missing if only phases that are over read it.
        seed: the run's data seed.
    """

    def __init__(self, phases: Sequence[Phase], *, sizes: Mapping[str, int], seed: int) -> None:
        self.phases, self.sizes, self.seed = list(phases), dict(sizes), seed
        self._starts = [0, *(phase.end for phase in self.phases[:-1])]
        self._drawn: list[dict[str, int]] = [{}]  # before each phase: source → its samples so far
        for number, phase in enumerate(self.phases):
            self._drawn.append(self._after(number, phase.end))

    def locate(self, g: np.ndarray) -> np.ndarray:
        """The address of the block that each global sample number reads.

        Args:
            g: (n,) non-negative integers: global sample numbers.

        Returns:
            (n, 2) int64: the source's number in the order of ``sizes``, and the number of the block within the source.
        """
        g = np.asarray(g, dtype=np.int64)
        addresses = np.empty((len(g), 2), dtype=np.int64)
        phase_of = np.searchsorted([phase.end for phase in self.phases[:-1]], g, side="right")  # (n,)
        for number in np.unique(phase_of).tolist():
            here = np.flatnonzero(phase_of == number)
            which, own = self._own_numbers(number, g[here])
            for index, name in enumerate(sorted(self.phases[number].quotas)):
                rows = here[which == index]
                if rows.size:
                    addresses[rows, 0] = list(self.sizes).index(name)
                    addresses[rows, 1] = self._blocks(name, own[which == index])
        return addresses

    def drawn(self, samples: int) -> dict[str, int]:
        """Source → how many of the first ``samples`` samples of the run are read from the source."""
        return self._after(int(np.searchsorted([phase.end for phase in self.phases[:-1]], samples)), samples)

    def _after(self, number: int, samples: int) -> dict[str, int]:
        """Source → how many of the run's first ``samples`` samples are read from it. The last one is in phase ``number``."""
        quotas = self.phases[number].quotas
        periods, rest = divmod(samples - self._starts[number], self.phases[number].period)
        places, _ = self._period_places(number, np.array([periods]))
        in_rest = np.bincount(places[0, :rest], minlength=len(quotas)).tolist()
        counts = dict(self._drawn[number])
        for name, more in zip(sorted(quotas), in_rest, strict=True):
            counts[name] = counts.get(name, 0) + periods * quotas[name] + more
        return counts

    def _own_numbers(self, number: int, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the source of each sample, and the sample's number within the source. ``g`` (n,): global numbers, in one phase.

        Returns the index of each sample's source among the sorted names of the sources of phase ``number`` (n,), and the
        sample's number among all samples that the run reads from that source (n,)."""
        names = sorted(self.phases[number].quotas)
        quotas = np.array([self.phases[number].quotas[name] for name in names])
        before = np.array([self._drawn[number].get(name, 0) for name in names])
        period, place = np.divmod(g - self._starts[number], self.phases[number].period)
        distinct, row = np.unique(period, return_inverse=True)
        which, earlier = np.empty_like(g), np.empty_like(g)
        rows_at_once = max(1, _AT_ONCE // self.phases[number].period)
        for first in range(0, len(distinct), rows_at_once):
            here = np.flatnonzero((row >= first) & (row < first + rows_at_once))
            places, counts = self._period_places(number, distinct[first : first + rows_at_once])
            which[here] = places[row[here] - first, place[here]]
            earlier[here] = counts[row[here] - first, place[here]]
        return which, before[which] + period * quotas[which] + earlier

    def _period_places(self, number: int, periods: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the sources of all P places of the e periods with the numbers ``periods`` (e,) in phase ``number``.

        Returns the index of the source at each place (e, P), among the phase's sources sorted by name, and how many earlier
        places of the same period that source has (e, P)."""
        phase = self.phases[number]
        quotas = [phase.quotas[name] for name in sorted(phase.quotas)]
        size = phase.period
        cards = np.repeat(np.arange(len(quotas)), quotas)  # (P,) in order of the names
        index = np.tile(np.arange(size), len(periods))
        seed = _seed(self.seed, "phase", str(self._starts[number]))
        shuffled = permute(index, size=size, seed=seed, epoch=np.repeat(periods, size)).reshape(len(periods), size)
        places = cards[shuffled]  # (e, P)
        # Sorted by source, the places of a source are consecutive, the earliest first.
        nth = np.arange(size) - np.repeat(np.cumsum([0, *quotas[:-1]]), quotas)  # (P,)
        earlier = np.empty_like(places)
        np.put_along_axis(earlier, np.argsort(places, axis=1, kind="stable"), nth[None, :], axis=1)
        return places, earlier

    def _blocks(self, name: str, own: np.ndarray) -> np.ndarray:
        """The number (n,) of the block that each of n samples reads. ``own`` (n,): the samples' numbers in source ``name``."""
        size = self.sizes[name]
        return permute(own % size, size=size, seed=_seed(self.seed, "source", name), epoch=own // size)


def _seed(seed: int, kind: str, name: str) -> int:
    """Derive a seed of 64 bits from the run's ``seed``. ``kind``: "phase" (``name``: its first sample's number) or "source"."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {kind} {name}".encode(), digest_size=8).digest(), "little")


def _decimal(value: Fraction) -> str:
    return f"{float(value):.10g}"

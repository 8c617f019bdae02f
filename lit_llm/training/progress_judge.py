"""Describes where each process of a run is in training, and finds the rank that is behind when no rank makes progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

LONG = ("setup", "first step", "checkpoint", "end of validation")
"""Hooks in which a rank may read, compile, write or score tasks for minutes. Only torch's own timeout ends such a rank."""
UNANSWERED = "does not answer (stopped, dead, or its machine is lost)"


class Place(NamedTuple):
    """Record that each process publishes about every second as its report: where the process is in training."""

    beat: int
    """Number of the report, counted from 1 in each process."""
    hooks: int
    """Number of training hooks that the process has passed since its start."""
    collectives: int
    """Number of collectives that the process has begun."""
    step: int
    """The optimizer step in which the process is, counted from 1; between two steps, the last complete step."""
    micro_batch: int
    """The micro-batch of `step` in which the process is, counted from 1; 0 before the first micro-batch of a launch."""
    micro_batches: int
    """Number of micro-batches in `step`."""
    hook: str
    """The latest hook that the process has passed, in words, such as "forward"."""
    collective: str | None = None
    """Text about the latest collective that the process has begun; None unless it has made no progress for half the timeout."""

    @property
    def progress(self) -> tuple[int, int]:
        return self.hooks, self.collectives

    def __str__(self) -> str:
        number = f"micro-batch {self.micro_batch} of {self.micro_batches}, " if self.micro_batch else ""
        where = f"step {self.step}, {number}{self.hook}"
        return where if self.collective is None else f"{where}, after {self.collective}"


@dataclass
class Judge:
    """Decides from the reports of all ranks whether the run makes progress, and if not, which rank is behind.

    Args:
        timeout: seconds without progress of any rank after which `verdict` returns one.
        silence: seconds without a new report after which a rank counts as silent.
        now: returns this machine's time in seconds. No other clock is read.
        places: rank → its latest report.
    """

    timeout: float
    silence: float
    now: Callable[[], float] = time.monotonic
    places: dict[int, Place] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    """Rank → the time, by `now`, at which its latest new report was read."""
    _moved: float | None = None

    def hear(self, rank: int, place: Place) -> None:
        """Store `place`, the latest report of a rank, and the time if the report is new or shows progress."""
        before, now = self.places.get(rank), self.now()
        if before is None or place.beat != before.beat:
            self.heard[rank] = now
        if before is None or place.progress != before.progress:
            self._moved = now
        self.places[rank] = place

    def silent(self, rank: int) -> bool:
        """Whether no new report of a rank was read for more than `silence` seconds. False before the rank's first report."""
        return rank in self.heard and self.now() - self.heard[rank] > self.silence

    def verdict(self) -> tuple[int, str] | None:
        """(the rank that is behind, a sentence about it) if no rank has made progress for `timeout` seconds; else None.

        Also None while the rank that is behind still publishes reports, and is in one of the hooks `LONG`, which may take long.
        """
        if self._moved is None or self.now() - self._moved < self.timeout:
            return None
        rank = min(self.places, key=lambda r: (not self.silent(r), self.places[r].progress, r))
        place = self.places[rank]
        if self.silent(rank):
            what = f"rank {rank} {UNANSWERED}; it was last in {place}"
        elif place.hook in LONG:
            return None
        elif len({each.progress for each in self.places.values()}) == 1:
            what = f"no rank is behind the others, all are in {place}"
        else:
            what = f"rank {rank} is behind, in {place}"
        return rank, no_progress(self.timeout, what)


def no_progress(timeout: float, what: str) -> str:
    """The error message that a run has made no progress for `timeout` seconds. `what` says which rank is behind, and where."""
    return f"the run has made no progress for {timeout:g} s: {what} (--hang_timeout)"

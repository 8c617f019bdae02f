"""Where the processes of a run are, and which of them is behind when none makes progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

LONG = ("setup", "first step", "checkpoint", "end of validation")
"""In these hooks a rank may read, compile, write or score tasks for minutes: only torch's own timeout applies to it."""
UNANSWERED = "does not answer (stopped, dead, or its machine is lost)"


class Place(NamedTuple):
    """Where a process is in training, as it reports every second. Such a report is a beat."""

    beat: int
    """The number of this report of the process."""
    hooks: int
    """Number of training hooks that the process has passed."""
    collectives: int
    """Number of collectives that the process has begun."""
    step: int
    """The optimizer step that the process makes, or has made last."""
    micro_batch: int
    """The micro-batch of this step, counted from 1; 0 before the first micro-batch of a launch."""
    micro_batches: int
    """Number of micro-batches of this step."""
    hook: str
    """The latest hook, in words, such as "forward"."""
    collective: str | None = None
    """The latest collective that the process has begun. None while it makes progress."""

    @property
    def progress(self) -> tuple[int, int]:
        return self.hooks, self.collectives

    def __str__(self) -> str:
        number = f"micro-batch {self.micro_batch} of {self.micro_batches}, " if self.micro_batch else ""
        where = f"step {self.step}, {number}{self.hook}"
        return where if self.collective is None else f"{where}, after {self.collective}"


@dataclass
class Judge:
    """Finds out that a run makes no progress, and which rank is behind. It reads only this machine's clock.

    Args:
        timeout: seconds without progress of any rank after which there is a verdict.
        silence: seconds without a new beat after which a process counts as silent.
        now: the clock, in seconds.
        places: the latest place of each rank.
    """

    timeout: float
    silence: float
    now: Callable[[], float] = time.monotonic
    places: dict[int, Place] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    """The time at which each rank's latest beat was heard."""
    _moved: float | None = None

    def hear(self, rank: int, place: Place) -> None:
        """Note a place that a rank has published. The same beat may be heard again; it counts once."""
        before, now = self.places.get(rank), self.now()
        if before is None or place.beat != before.beat:
            self.heard[rank] = now
        if before is None or place.progress != before.progress:
            self._moved = now
        self.places[rank] = place

    def silent(self, rank: int) -> bool:
        """Whether a process has published no new beat for `silence` seconds."""
        return rank in self.heard and self.now() - self.heard[rank] > self.silence

    def verdict(self) -> tuple[int, str] | None:
        """(the rank that is behind, a sentence about it) if no rank has made progress for `timeout` seconds; else None.

        Also None while that rank is in one of the hooks `LONG`, and not silent.
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
    """The message with which a run ends that has made no progress; `what` says which rank is behind, and where."""
    return f"the run has made no progress for {timeout:g} s: {what} (--hang_timeout)"

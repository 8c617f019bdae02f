"""Where the processes of a run are, and which of them is behind when none makes progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

LONG = ("setup", "first step", "checkpoint", "end of validation")
"""Here a rank may read, compile, write or score tasks for minutes between two hooks: only torch's own timeout applies."""
UNANSWERED = "does not answer (stopped, dead, or its machine is lost)"


class Place(NamedTuple):
    """Where a process is."""

    beat: int
    """The number of this report."""
    hooks: int
    """Number of training hooks that it has passed."""
    collectives: int
    """Number of collectives that it has begun."""
    step: int
    """The optimizer step that it makes, or has made last."""
    micro_batch: int
    """Of this step, from 1; 0 before the first one of a launch."""
    micro_batches: int
    """Of this step."""
    hook: str
    collective: str | None = None
    """The latest collective; set only after some time without progress."""

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
        silence: seconds without a beat after which a process counts as silent.
    """

    timeout: float
    silence: float
    now: Callable[[], float] = time.monotonic
    places: dict[int, Place] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    """The time at which each rank's latest beat was heard."""
    _moved: float | None = None

    def hear(self, rank: int, place: Place) -> None:
        """Take a published place of a rank."""
        before, now = self.places.get(rank), self.now()
        if before is None or place.beat != before.beat:
            self.heard[rank] = now
        if before is None or place.progress != before.progress:
            self._moved = now
        self.places[rank] = place

    def silent(self, rank: int) -> bool:
        """Whether a process has sent no beat for `silence` seconds."""
        return rank in self.heard and self.now() - self.heard[rank] > self.silence

    def verdict(self) -> tuple[int, str] | None:
        """The rank that is behind, and a sentence, if no rank has made progress for the timeout."""
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
    """The message with which a run ends."""
    return f"the run has made no progress for {timeout:g} s: {what} (--hang_timeout)"

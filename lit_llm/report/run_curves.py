"""What the page shows of one run: its curves over steps, tokens and time, and its most important figures."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lit_llm.plan.run_record import recorded_launches
from lit_llm.report.charts import Points
from lit_llm.runs.loaded_run import LoadedRun, Series

TOKENS = "progress/tokens"


class RunCurves:
    """A run with what the page needs of it.

    Args:
        name: by which the page calls it.
    """

    def __init__(self, run: LoadedRun, name: str) -> None:
        self.run, self.name = run, name
        self.launches = recorded_launches(run.path)
        self._clock = _clock(run.scalars, [_seconds(launch) for launch in self.launches])

    def over_steps(self, tag: str) -> Points:
        series = self._series(tag)
        return list(zip(series.steps, series.values, strict=True))

    def over_tokens(self, tag: str) -> Points:
        """Over trained tokens; none if they were not logged."""
        tokens, series = self._series(TOKENS), self._series(tag)
        found = []
        for step, value in zip(series.steps, series.values, strict=True):
            at = bisect.bisect_right(tokens.steps, step) - 1  # of the same row, or of the last one before a validation
            if at >= 0:
                found.append((tokens.values[at], value))
        return found

    def over_time(self, tag: str) -> Points:
        """Over seconds since the first row, without the pauses between launches."""
        series = self._series(tag)
        return [(self._clock(time), value) for time, value in zip(series.times, series.values, strict=True)]

    def last(self, tag: str) -> float | None:
        """The last value of a tag."""
        values = self._series(tag).values
        return values[-1] if values else None

    @property
    def seconds(self) -> float:
        """From the first row to the last, without the pauses between launches."""
        return max((self._clock(series.times[-1]) for series in self.run.scalars.values()), default=0.0)

    @property
    def step(self) -> int:
        """The last logged optimizer step."""
        return max((series.steps[-1] for series in self.run.scalars.values()), default=0)

    def _series(self, tag: str) -> Series:
        return self.run.scalars.get(tag, Series((), (), ()))


def named(paths: Sequence[Path]) -> list[str]:
    """A short name for each run: its folder's, or its whole path if two folders have the same name."""
    names = [path.absolute().name for path in paths]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]


def _seconds(launch: dict[str, Any]) -> float:
    return datetime.fromisoformat(launch["started"]).timestamp()


def _clock(scalars: dict[str, Series], starts: list[float]) -> Callable[[float], float]:
    """A function from the time of a row to the seconds that the run had been running since its first row.

    Between two launches nothing runs: from the last row before a start to the start.
    """
    times = sorted({time for series in scalars.values() for time in series.times})
    pauses = []  # (begin, length)
    for start in starts:
        at = bisect.bisect_left(times, start) - 1
        if 0 <= at < len(times) - 1:
            pauses.append((times[at], start - times[at]))
    first = times[0] if times else 0.0
    return lambda time: time - first - sum(length for begin, length in pauses if begin < time)

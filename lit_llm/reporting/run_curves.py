"""A run's logged curves over steps, tokens and time, and the records of its launches, for the pages of `report`."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lit_llm.reporting.charts import Points
from lit_llm.runs.curve import versions_text
from lit_llm.runs.loaded_run import LoadedRun, Series
from lit_llm.runs.plan_record import recorded_launches

TOKENS = "progress/tokens"
Launch = dict[str, Any]
"""The record of one launch (one start of `fit` in the run folder) that the callback `PlanMonitor` wrote into plan.json."""


class RunCurves:
    """Reader of the curves and launches of a run for a page. A tag is the name of a logged curve, such as train/loss.

    Args:
        name: the run's name on the page.
    """

    def __init__(self, run: LoadedRun, name: str) -> None:
        self.run, self.name = run, name
        self.launches = recorded_launches(run.path)
        starts = [datetime.fromisoformat(launch["started"]).timestamp() for launch in self.launches]
        self._clock = _clock(run.scalars, starts)

    def over_steps(self, tag: str) -> Points:
        series = self.series(tag)
        return list(zip(series.steps, series.values, strict=True))

    def over_tokens(self, tag: str) -> Points:
        """Return points (tokens trained so far, value) of the curve `tag`; empty if tokens were not logged."""
        tokens, series = self.series(TOKENS), self.series(tag)
        points = []
        for step, value in zip(series.steps, series.values, strict=True):
            at = bisect.bisect_right(tokens.steps, step) - 1  # the same row; for a validation, the last row before it
            if at >= 0:
                points.append((tokens.values[at], value))
        return points

    def over_time(self, tag: str) -> Points:
        """Return points (seconds since the first logged row without the pauses between launches, value) of the curve `tag`."""
        series = self.series(tag)
        return [(self._clock(time), value) for time, value in zip(series.times, series.values, strict=True)]

    def last(self, tag: str) -> float | None:
        """Return the last value of the curve `tag`; None if the curve was not logged."""
        values = self.series(tag).values
        return values[-1] if values else None

    @property
    def seconds(self) -> float:
        """Seconds from the first logged row to the last, without the pauses between launches."""
        return max((self._clock(max(series.times)) for series in self.run.scalars.values()), default=0.0)

    @property
    def end(self) -> Launch | None:
        """The record of the last launch, if it has ended. None: no record, it still runs, or a later launch is not recorded."""
        last = self.launches[-1] if self.launches else None
        return last if last is not None and last["ended"] and last["last_step"] >= self.step else None

    @property
    def environment(self) -> str:
        """Text that names package versions, hardware and machine of the last launch; "" if no launch is recorded."""
        for last in self.launches[-1:]:
            machine = ", ".join(f"{name} {value}" for name, value in last["machine"].items())
            return f"{versions_text(last['versions'])}; {last['hardware']['name']}; {machine}"
        return ""

    @property
    def step(self) -> int:
        """The last logged optimizer step."""
        return max((series.steps[-1] for series in self.run.scalars.values()), default=0)

    def series(self, tag: str) -> Series:
        """Return the steps, values and times of the curve `tag`; an empty series if the curve was not logged."""
        return self.run.scalars.get(tag, Series((), (), ()))


def named(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each run folder: the folder's name, or the whole path if two folders have the same name."""
    names = [path.absolute().name for path in paths]
    chosen = [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]
    return [name.encode(errors="replace").decode() for name in chosen]


def _clock(scalars: dict[str, Series], starts: list[float]) -> Callable[[float], float]:
    """Return a function from a row's time stamp to the seconds since the first row, without the pauses between launches.

    A pause is the time from the last row before a launch's start to this start. If several launches started after the same row,
    because some of them logged no row, the pause ends with the last of these starts.

    Args:
        scalars: {name of a curve: its rows}.
        starts: time stamps of the starts of all launches, in seconds.
    """
    times = sorted({time for series in scalars.values() for time in series.times if math.isfinite(time)})
    pauses: dict[float, float] = {}  # begin → length
    for start in starts:
        at = bisect.bisect_left(times, start) - 1
        if 0 <= at < len(times) - 1:
            pauses[times[at]] = max(start - times[at], pauses.get(times[at], 0.0))
    first = times[0] if times else 0.0
    return lambda time: time - first - sum(length for begin, length in pauses.items() if begin < time)

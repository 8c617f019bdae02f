"""One run as a page shows it: its curves over steps, tokens and time, and its launches."""

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
"""The record of one launch that `PlanMonitor` wrote into plan.json."""


class RunCurves:
    """A run with the curves and launches that a page shows.

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
        """Values of a tag over trained tokens; empty if tokens were not logged."""
        tokens, series = self.series(TOKENS), self.series(tag)
        points = []
        for step, value in zip(series.steps, series.values, strict=True):
            at = bisect.bisect_right(tokens.steps, step) - 1  # tokens of the same row, or of the last row before a validation
            if at >= 0:
                points.append((tokens.values[at], value))
        return points

    def over_time(self, tag: str) -> Points:
        """Values of a tag over seconds since the first row, without the pauses between launches."""
        series = self.series(tag)
        return [(self._clock(time), value) for time, value in zip(series.times, series.values, strict=True)]

    def last(self, tag: str) -> float | None:
        """The last value of a tag; None if it was not logged."""
        values = self.series(tag).values
        return values[-1] if values else None

    @property
    def seconds(self) -> float:
        """Seconds from the first row to the last, without the pauses between launches."""
        return max((self._clock(max(series.times)) for series in self.run.scalars.values()), default=0.0)

    @property
    def end(self) -> Launch | None:
        """The record of the last launch. None: it has no end, or a launch without a record (`--plan null`) made later steps."""
        last = self.launches[-1] if self.launches else None
        return last if last is not None and last["ended"] and last["last_step"] >= self.step else None

    @property
    def environment(self) -> str:
        """Versions, hardware and machine of the last launch; "" if none is recorded."""
        for last in self.launches[-1:]:
            machine = ", ".join(f"{name} {value}" for name, value in last["machine"].items())
            return f"{versions_text(last['versions'])}; {last['hardware']['name']}; {machine}"
        return ""

    @property
    def step(self) -> int:
        """The last logged optimizer step."""
        return max((series.steps[-1] for series in self.run.scalars.values()), default=0)

    def series(self, tag: str) -> Series:
        """The values of a tag; empty if it was not logged."""
        return self.run.scalars.get(tag, Series((), (), ()))


def named(paths: Sequence[Path]) -> list[str]:
    """A short name for each run: its folder's, or its whole path if two folders have the same name."""
    names = [path.absolute().name for path in paths]
    chosen = [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]
    return [name.encode(errors="replace").decode() for name in chosen]


def _clock(scalars: dict[str, Series], starts: list[float]) -> Callable[[float], float]:
    """A function from the time of a row to the seconds that the run had been running since its first row.

    The time from the last row before the start of a launch to that start does not count. If several launches started after the
    same row, because some of them logged no row, the time until the last of these starts does not count.
    """
    times = sorted({time for series in scalars.values() for time in series.times if math.isfinite(time)})
    pauses: dict[float, float] = {}  # begin → length
    for start in starts:
        at = bisect.bisect_left(times, start) - 1
        if 0 <= at < len(times) - 1:
            pauses[times[at]] = max(start - times[at], pauses.get(times[at], 0.0))
    first = times[0] if times else 0.0
    return lambda time: time - first - sum(length for begin, length in pauses.items() if begin < time)

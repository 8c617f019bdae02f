"""What the page shows of one run: its curves over steps, tokens and time, and its launches."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from lit_llm.reporting.charts import Points
from lit_llm.runs.curve import versions_text
from lit_llm.runs.loaded_run import LoadedRun, Series
from lit_llm.runs.plan_record import recorded_launches

TOKENS = "progress/tokens"


class Launch(NamedTuple):
    """What plan.json says of one launch. Numbers are those that it has, by name."""

    started: datetime
    first_step: int
    last_step: int
    """Steps that were complete when it last wrote plan.json."""
    versions: str
    environment: str
    parameters: float | None
    planned: dict[str, float]
    measured: dict[str, float]
    hardware: str
    model: dict[str, Any]
    devices: int
    price: tuple[float, float] | None
    """USD per device-hour, lowest and highest. None: nobody knew it, or the version of lit_llm did not record it."""
    ended: str
    """Why it ended, like "reached trainer.max_steps=40". "": it runs, died, or the version of lit_llm did not record it."""
    complete: bool
    """Whether that is the end that its settings ask for. A signal and the spike guard end a run before."""

    @classmethod
    def of(cls, recorded: dict[str, Any]) -> Launch:
        """A launch as `fit` has recorded it."""
        machine = ", ".join(f"{name} {value}" for name, value in recorded["machine"].items())
        versions = versions_text(recorded["versions"])
        name, devices = recorded["hardware"]["name"], recorded.get("devices", 1)
        return cls(
            datetime.fromisoformat(recorded["started"]),
            recorded.get("first_step") or 0,
            recorded.get("last_step") or 0,
            versions,
            f"{versions}; {name}; {machine}",
            _numbers(recorded).get("parameters"),
            _numbers(recorded.get("predicted")),
            _numbers(recorded["measured"]),
            f"{devices} x {name}" if devices > 1 else name,
            (recorded.get("settings") or {}).get("model") or {},
            devices,
            None if (price := recorded.get("price_usd_hour")) is None else (float(price[0]), float(price[1])),
            recorded.get("ended") or "",
            recorded.get("complete", False),
        )


class RunCurves:
    """A run with what the page needs of it.

    Args:
        name: by which the page calls it.
    """

    def __init__(self, run: LoadedRun, name: str) -> None:
        self.run, self.name = run, name
        self.launches = [Launch.of(each) for each in recorded_launches(run.path)]
        self._clock = _clock(run.scalars, [launch.started.timestamp() for launch in self.launches])

    def over_steps(self, tag: str) -> Points:
        series = self.series(tag)
        return list(zip(series.steps, series.values, strict=True))

    def over_tokens(self, tag: str) -> Points:
        """Over trained tokens; none if they were not logged."""
        tokens, series = self.series(TOKENS), self.series(tag)
        found = []
        for step, value in zip(series.steps, series.values, strict=True):
            at = bisect.bisect_right(tokens.steps, step) - 1  # of the same row, or of the last one before a validation
            if at >= 0:
                found.append((tokens.values[at], value))
        return found

    def over_time(self, tag: str) -> Points:
        """Over seconds since the first row, without the pauses between launches."""
        series = self.series(tag)
        return [(self._clock(time), value) for time, value in zip(series.times, series.values, strict=True)]

    def last(self, tag: str) -> float | None:
        """The last value of a tag."""
        values = self.series(tag).values
        return values[-1] if values else None

    @property
    def seconds(self) -> float:
        """From the first row to the last, without the pauses between launches."""
        return max((self._clock(max(series.times)) for series in self.run.scalars.values()), default=0.0)

    @property
    def end(self) -> Launch | None:
        """The last launch, if it recorded how it ended. A later step is of a launch that recorded nothing (`--plan null`)."""
        last = self.launches[-1] if self.launches else None
        return last if last is not None and last.ended and last.last_step >= self.step else None

    @property
    def step(self) -> int:
        """The last logged optimizer step."""
        return max((series.steps[-1] for series in self.run.scalars.values()), default=0)

    def series(self, tag: str) -> Series:
        """The values of a tag; none if it was not logged."""
        return self.run.scalars.get(tag, Series((), (), ()))


def named(paths: Sequence[Path]) -> list[str]:
    """A short name for each run: its folder's, or its whole path if two folders have the same name."""
    names = [path.absolute().name for path in paths]
    chosen = [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]
    return [name.encode(errors="replace").decode() for name in chosen]


def _numbers(recorded: Any) -> dict[str, float]:
    return {name: float(value) for name, value in (recorded or {}).items() if is_number(value)}


def is_number(value: Any) -> bool:
    """Whether a value of JSON or YAML is a number, neither NaN nor too large for a float."""
    return isinstance(value, int | float) and abs(value) < 1e300


def _clock(scalars: dict[str, Series], starts: list[float]) -> Callable[[float], float]:
    """A function from the time of a row to the seconds that the run had been running since its first row.

    Between two launches nothing runs: from the last row before a start to the start. A launch may have logged no row.
    """
    times = sorted({time for series in scalars.values() for time in series.times if math.isfinite(time)})
    pauses: dict[float, float] = {}  # begin → length
    for start in starts:
        at = bisect.bisect_left(times, start) - 1
        if 0 <= at < len(times) - 1:
            pauses[times[at]] = max(start - times[at], pauses.get(times[at], 0.0))
    first = times[0] if times else 0.0
    return lambda time: time - first - sum(length for begin, length in pauses.items() if begin < time)

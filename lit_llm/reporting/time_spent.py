"""Split a run's time into parts (forward, backward, data, validation, …), from curves of `TimeBreakdown` or `Throughput`."""

from __future__ import annotations

import math
from collections import defaultdict

from lit_llm.core import html_page as html
from lit_llm.core.number_text import duration, percent
from lit_llm.reporting.run_curves import TOKENS, RunCurves

_SHARES = {
    "time/forward_fraction": "forward",
    "time/backward_fraction": "backward",
    "time/optimizer_fraction": "optimizer",
    "time/communication_fraction": "communication alone",
    "time/data_stall_fraction": "waiting for data",
    "time/validation_fraction": "validation",
    "time/checkpoint_fraction": "saving",
    "time/other_fraction": "everything else",
}
"""{curve that the callback `TimeBreakdown` logs: name of the part}."""
_REST = "validation, saving and samples"
_COLORS = dict(zip((*_SHARES.values(), "training steps", _REST), (0, 1, 2, 7, 6, 4, 5, 8, 0, 4), strict=True))


TimeSpent = tuple[dict[str, float], str]
"""({part: seconds}, name of the callback that measured the seconds)."""


def time_spent(run: RunCurves) -> TimeSpent | None:
    """Return ({part of the time: its seconds}, the callback that logged it: `TimeBreakdown` or `Throughput`), or None.

    `Throughput` measures only training steps, so all other time between two rows counts as validation, saving and samples.
    """
    stretches = _stretches(run)
    seconds: defaultdict[str, float] = defaultdict(float)
    shares = {name: dict(run.over_steps(tag)) for tag, name in _SHARES.items()}
    if any(shares.values()):
        for step, (length, _) in stretches.items():
            for name, values in shares.items():
                if math.isfinite(values.get(step, math.nan)):
                    seconds[name] += length * values[step]
        return (seconds, "TimeBreakdown") if any(seconds.values()) else None
    speeds, waits = dict(run.over_steps("throughput/tokens_per_second")), dict(run.over_steps("time/data_fraction"))
    for step, (length, tokens) in stretches.items():
        if speeds.get(step, 0.0) > 0:
            training = min(length, tokens / speeds[step])
            waiting = training * min(max(waits.get(step, 0.0), 0.0), 1.0)
            seconds["training steps"] += training - waiting
            seconds["waiting for data"] += waiting
            seconds[_REST] += length - training
    return (seconds, "Throughput") if any(seconds.values()) else None


def _stretches(run: RunCurves) -> dict[int, tuple[float, float]]:
    """Return {step of a row: (seconds, tokens) since the previous row, without pauses between launches}."""
    times, tokens = run.over_time(TOKENS), run.over_steps(TOKENS)
    stretches = {}
    for i in range(1, min(len(times), len(tokens))):
        length, trained = times[i][0] - times[i - 1][0], tokens[i][1] - tokens[i - 1][1]
        if length > 0 and trained > 0:
            stretches[int(tokens[i][0])] = (length, trained)
    return stretches


def time_figure(runs: list[tuple[str, TimeSpent]]) -> str:
    """Return the HTML of a stacked bar for each run, and a table of the parts. `runs`: (name of the run, time by part)."""
    names = list(dict.fromkeys(name for _, (seconds, _) in runs for name in seconds))
    rows, cells = [], []
    for run, (parts, _) in runs:
        at, bars, said = 0.0, [], {}
        for name, seconds in parts.items():
            share = seconds / sum(parts.values())
            said[name] = f"{percent(share)}, {duration(seconds)}"
            bars.append(html.Bar(at, at + share, _COLORS[name], f"{name}: {said[name]}"))
            at += share
        rows.append((run if len(runs) > 1 else "", bars))
        cells.append(said)
    ticks = [(share, f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    table = html.table(
        ["", *(run if len(runs) > 1 else "share of the time" for run, _ in runs)],
        [[name, *(said.get(name, "–") for said in cells)] for name in names],
        kind="figures",
    )
    caption = f"Between the rows that were logged, by {' and '.join(sorted({measured_by for _, (_, measured_by) in runs}))}"
    return html.figure(
        caption, html.legend([(_COLORS[name], name) for name in names]) + html.lanes("time", rows, 1.0, ticks), table
    )

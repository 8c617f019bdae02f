"""The HTML page of a sweep of plans: a scatter plot of cost over time, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lit_llm.core import html_page as html
from lit_llm.core.number_text import counted, duration, money, two_digits
from lit_llm.plan.sweep import Variant
from lit_llm.reporting.charts import COLORS, Line, chart
from lit_llm.reporting.plan_text import SWEEP, sweep_row

_TIMES = {
    f"{number} {unit}": number * hours
    for unit, hours, numbers in (
        ("ms", 1 / 3.6e6, (1, 10, 100)),
        ("s", 1 / 3600, (1, 2, 5, 10, 20, 30)),
        ("min", 1 / 60, (1, 2, 5, 10, 20, 30)),
        ("h", 1.0, (1, 2, 5, 10)),
        ("days", 24.0, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)),
    )
    for number in numbers
}
"""Marks of the time axis: {label: hours}."""


def sweep_page(variants: Sequence[Variant], best: Variant | None, command: str) -> str:
    """Return the whole HTML page of a sweep. `best`: the variant that was chosen, or None. `command` made the page."""
    title = f"Sweep: {len(variants)} combinations"
    return html.document(title, [html.heading("Time against cost"), sweep_figure(variants, best)], command)


class Point(NamedTuple):
    """Record of a point of the scatter plot: `hours` of a variant's run, and its `cost`: the lower end of the range of costs in
    USD or, if the price of any variant is unknown, the device-hours. `fits`: False only if it surely does not fit in memory."""

    variant: Variant
    hours: float
    cost: float
    fits: bool
    devices: int = 1


def points_of(variants: Sequence[Variant]) -> list[Point]:
    """Return the points of the variants whose time is known."""
    timed = [(variant, plan) for variant in variants if (plan := variant.plan) is not None and plan.run_seconds is not None]
    priced = all(plan.usd for _, plan in timed)
    points = []
    for variant, plan in timed:
        hours = (plan.run_seconds or 0.0) / 3600
        cost = plan.usd[0] if priced and plan.usd else plan.device_hours or 0.0
        points.append(Point(variant, hours, cost, plan.fits is not False, plan.settings.layout.devices))
    return points


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that fit into memory, except each point for which another fitting point takes less time or costs less
    and is not worse in the other respect."""
    front: list[Point] = []
    for point in sorted((p for p in points if p.fits), key=lambda p: (p.hours, p.cost)):
        if not front or point.cost < front[-1].cost or (point.hours, point.cost) == front[-1][1:3]:
            front.append(point)
    return front


def sweep_figure(variants: Sequence[Variant], best: Variant | None) -> str:
    """Return the HTML of the scatter plot of all variants, the table of the Pareto front, and the table of all variants."""
    points = points_of(variants)
    axes = list(variants[0].values) if variants else []
    every = html.table(
        [*axes, *SWEEP], [sweep_row(variant) for variant in variants], summary=f"All {len(variants)} combinations"
    )
    refused = [[", ".join(v.values.values()), v.problem] for v in variants if v.problem]
    problems = html.table([", ".join(axes), "problem"], refused, summary=f"{len(refused)} that cannot be") if refused else ""
    if not points:
        return html.figure("No combination has a known time.", "", every + problems)
    priced = all(v.plan.usd for v in variants if v.plan is not None and v.plan.run_seconds is not None)
    front = pareto_front(points)
    numbers: dict[tuple[float, float], int] = {}
    for point in front:
        numbers.setdefault((point.hours, point.cost), len(numbers) + 1)
    lines = [Line("Pareto front", 8, [(p.hours, p.cost) for p in front], "dashed")]
    devices = sorted({point.devices for point in points})
    for point in sorted(points, key=lambda p: (p.variant is best, p.fits, p in front)):  # the last is on top
        place = numbers.get((point.hours, point.cost)) if point in front else None
        name = f"{place}: {_settings(point.variant)}" if place else _settings(point.variant)
        label = " ".join([str(place or ""), "chosen" if point.variant is best else ""]).strip()
        kind = "points" if point.fits else "hollow"
        color = COLORS[devices.index(point.devices) % len(COLORS)]
        lines.append(Line(name, color, [(point.hours, point.cost)], kind, counted(point.devices, "device"), label))
    hours = [point.hours for point in points]
    picture = chart(
        lines,
        label="cost" if priced else "device-hours",
        x_name="time of the run",
        text_of_x=lambda at: next((name for name, mark in _TIMES.items() if mark == at), duration(3600 * at)),
        unit="USD" if priced else "device-hours",
        columns=html.few([mark for mark in _TIMES.values() if min(hours) <= mark <= max(hours)], 6),
        logarithmic=True,
        logarithmic_x=True,
    )
    caption = f"Time of the run against {'its cost at the lower price' if priced else 'device-hours'}, on logarithmic axes. "
    caption += "Nothing that fits is both faster and cheaper than a numbered point, of the Pareto front; rings do not fit."
    missing = len(variants) - len(points)
    caption += " Chosen: the cheapest within the limits." if best is not None else ""
    caption += f" {missing} combinations have no time and are not drawn." if missing else ""
    listed = []
    for point in [*front, *(p for p in points if p.variant is best and p not in front)]:
        number = str(numbers.get((point.hours, point.cost), "")) + " chosen" * (point.variant is best)
        cost = money(point.cost) if priced else f"{two_digits(point.cost)} device-hours"
        listed.append([number, duration(point.hours * 3600), cost, _settings(point.variant)])
    return html.figure(caption, picture, html.table(["front", "time", "cost", "settings"], listed) + every + problems)


def _settings(variant: Variant) -> str:
    return ", ".join(f"{key} {value}" for key, value in variant.values.items())

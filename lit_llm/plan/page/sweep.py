"""The picture of a sweep: time against cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from lit_llm.plan.numbers import duration, money, two_digits
from lit_llm.plan.page import html
from lit_llm.plan.sweep import HEADER, Variant, row

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
"""Hours of the marks of the time axis."""


class Point(NamedTuple):
    """A variant's run: hours, and USD at the lower price, or device-hours without prices."""

    variant: Variant
    hours: float
    cost: float
    fits: bool


def points_of(found: Sequence[Variant]) -> list[Point]:
    """The variants with a time."""
    timed = [(variant, plan) for variant in found if (plan := variant.plan) is not None and plan.run_seconds is not None]
    priced = all(plan.usd for _, plan in timed)
    points = []
    for variant, plan in timed:
        hours = (plan.run_seconds or 0.0) / 3600
        cost = plan.usd[0] if priced and plan.usd else hours * plan.settings.layout.devices
        points.append(Point(variant, hours, cost, plan.fits is not False))
    return points


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Of the points that fit, those for which no other is better in one of time and cost, and as good in the other."""
    front: list[Point] = []
    for point in sorted((p for p in points if p.fits), key=lambda p: (p.hours, p.cost)):
        if not front or point.cost < front[-1].cost or (point.hours, point.cost) == front[-1][1:3]:
            front.append(point)
    return front


def sweep_figure(found: Sequence[Variant], best: Variant | None) -> str:
    """The scatter of all variants, the table of its front, and that of all."""
    points = points_of(found)
    axes = list(found[0].values) if found else []
    every = html.table([*axes, *HEADER], [row(variant) for variant in found], summary=f"All {len(found)} combinations")
    refused = [[", ".join(v.values.values()), v.problem] for v in found if v.problem]
    problems = html.table([", ".join(axes), "problem"], refused, summary=f"{len(refused)} that cannot be") if refused else ""
    if not points:
        return html.figure("No combination has a known time.", "", every + problems)
    priced = all(p.variant.plan is not None and p.variant.plan.usd for p in points)
    front = pareto_front(points)
    numbers: dict[tuple[float, float], int] = {}
    for point in front:
        numbers.setdefault((point.hours, point.cost), len(numbers) + 1)
    shapes, place = _axes(points, priced=priced)
    shapes += [_dot(place(p), p, 'class="out" r="4"') for p in points if not p.fits]
    shapes += [_dot(place(p), p, 'fill="var(--c0)" r="4"') for p in points if p.fits]
    shapes += _front(front, numbers, place, best)
    caption = f"Time of the run against {'its cost at the lower price' if priced else 'device-hours'}, on logarithmic axes. "
    caption += "Numbered: the Pareto front, than which nothing that fits is both faster and cheaper. Rings do not fit."
    missing = len(found) - len(points)
    caption += f" {missing} combinations have no time and are not drawn." if missing else ""
    listed = []
    for point in front:
        number = str(numbers[point.hours, point.cost]) + (" *" if point.variant is best else "")
        cost = money(point.cost) if priced else f"{two_digits(point.cost)} device-hours"
        listed.append([number, duration(point.hours * 3600), cost, _settings(point.variant)])
    chosen = "<p>* the cheapest that fits, within the limits.</p>" if any(p.variant is best for p in front) else ""
    shown = html.table(["front", "time", "cost", "settings"], listed)
    entries = html.legend([(0, "fits"), (7, "Pareto front"), (8, "does not fit")])
    picture = html.plot("Time against cost", 320, shapes, below=42)
    return html.figure(caption, picture, entries + shown + chosen + every + problems)


def _axes(points: Sequence[Point], *, priced: bool) -> tuple[list[str], _Place]:
    place = _Place(_range([p.hours for p in points]), _range([p.cost for p in points]))
    shapes = []
    within = [(name, hours) for name, hours in _TIMES.items() if place.hours[0] <= hours <= place.hours[1]]
    for name, hours in html.few(within, 4):
        x = place.x(hours)
        shapes += [html.line(x, 0, x, 100, "grid"), html.text(x, 100.0, name, anchor="middle", dy=16)]
    for value in html.log_ticks(*place.costs, 6):
        y = place.y(value)
        shapes.append(html.line(0, y, 100, y, "grid"))
        said = money(value) if priced else two_digits(value)
        shapes.append(html.text("-6", y, said, anchor="end", dy=4))
    shapes.append(html.text(100.0, 100.0, "time of the run", anchor="end", dy=34))
    shapes.append(html.text("-50", 0.0, "cost" if priced else "device-hours", dy=-8))
    return shapes, place


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A range around the values, at least a factor of four wide."""
    low, high = min(values), max(values)
    spare = max(1.15, 2 * math.sqrt(low / high))
    return low / spare, high * spare


class _Place(NamedTuple):
    """From values to percentages of the picture."""

    hours: tuple[float, float]
    costs: tuple[float, float]

    def x(self, hours: float) -> float:
        low, high = self.hours
        return 100 * math.log(hours / low) / math.log(high / low)

    def y(self, cost: float) -> float:
        low, high = self.costs
        return 100 - 100 * math.log(cost / low) / math.log(high / low)

    def __call__(self, point: Point) -> tuple[float, float]:
        return self.x(point.hours), self.y(point.cost)


def _dot(at: tuple[float, float], point: Point, style: str) -> str:
    said = f"{_settings(point.variant)}: {duration(3600 * point.hours)}{'' if point.fits else ', does not fit'}"
    return f'<circle {style} cx="{at[0]:.2f}%" cy="{at[1]:.2f}%"><title>{html.escape(said)}</title></circle>'


def _front(front: list[Point], numbers: dict[tuple[float, float], int], place: _Place, best: Variant | None) -> list[str]:
    """The line of the front, and its numbers where there is room."""
    spots = [place(point) for point in front]
    shapes = [html.line(*a, *b, "front") for a, b in itertools.pairwise(spots) if a != b]
    written: list[tuple[float, float]] = []
    for point, (x, y) in zip(front, spots, strict=True):
        ring = ' stroke="var(--text)" stroke-width="2"' if point.variant is best else ""
        shapes.append(_dot((x, y), point, f'fill="var(--c7)" r="5"{ring}'))
    for (hours, cost), number in numbers.items():
        x, y = place.x(hours), place.y(cost)
        for dy in (-9, 19):
            if all(abs(x - a) > 6 or abs(y + dy / 3.2 - b) > 4 for a, b in written):
                shapes.append(html.text(x, y, str(number), anchor="middle", kind="strong", dy=dy))
                written.append((x, y + dy / 3.2))
                break
    return shapes


def _settings(variant: Variant) -> str:
    return ", ".join(f"{key} {value}" for key, value in variant.values.items())

"""The page of a sweep of plans: time against cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lit_llm.core import html_page as html
from lit_llm.core.number_text import duration, money, two_digits
from lit_llm.plan.sweep import Variant
from lit_llm.reporting.plan_page import top
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
"""Hours of the marks of the time axis."""


def sweep_page(found: Sequence[Variant], best: Variant | None, command: str) -> str:
    """The page of a sweep. `best`: the variant that was chosen, if one was."""
    title = f"Sweep: {len(found)} combinations"
    return html.document(title, [*top(title, command), html.heading("Time against cost"), sweep_figure(found, best)])


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
        cost = plan.usd[0] if priced and plan.usd else plan.device_hours or 0.0
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
    every = html.table([*axes, *SWEEP], [sweep_row(variant) for variant in found], summary=f"All {len(found)} combinations")
    refused = [[", ".join(v.values.values()), v.problem] for v in found if v.problem]
    problems = html.table([", ".join(axes), "problem"], refused, summary=f"{len(refused)} that cannot be") if refused else ""
    if not points:
        return html.figure("No combination has a known time.", "", every + problems)
    priced = all(v.plan.usd for v in found if v.plan is not None and v.plan.run_seconds is not None)
    front = pareto_front(points)
    numbers: dict[tuple[float, float], int] = {}
    for point in front:
        numbers.setdefault((point.hours, point.cost), len(numbers) + 1)
    x, y = log_scale([p.hours for p in points]), log_scale([p.cost for p in points], down=True)
    shapes = _grid(x, y, priced=priced)
    shapes += [html.line(x(a.hours), y(a.cost), x(b.hours), y(b.cost), "front") for a, b in itertools.pairwise(front)]
    for point in sorted(points, key=lambda p: (p.variant is best, p.fits, p in front)):  # the last is on top
        style = 'fill="var(--c7)" r="5"' if point in front else 'fill="var(--c0)" r="4"' if point.fits else 'class="out" r="4"'
        style += ' stroke="var(--text)" stroke-width="2"' if point.variant is best else ""
        said = f"{_settings(point.variant)}: {duration(3600 * point.hours)}{'' if point.fits else ', does not fit'}"
        where = f'cx="{x(point.hours):.2f}%" cy="{y(point.cost):.2f}%"'
        shapes.append(f"<circle {style} {where}><title>{html.escape(said)}</title></circle>")
    shapes += _labels([(x(hours), y(cost), str(number)) for (hours, cost), number in numbers.items()])
    caption = f"Time of the run against {'its cost at the lower price' if priced else 'device-hours'}, on logarithmic axes. "
    caption += "Numbered: the Pareto front, than which nothing that fits is both faster and cheaper. Rings do not fit."
    missing = len(found) - len(points)
    caption += " Circled: the cheapest within the limits." if best is not None else ""
    caption += f" {missing} combinations have no time and are not drawn." if missing else ""
    listed = []
    for point in [*front, *(p for p in points if p.variant is best and p not in front)]:
        number = str(numbers.get((point.hours, point.cost), "")) + " circled" * (point.variant is best)
        cost = money(point.cost) if priced else f"{two_digits(point.cost)} device-hours"
        listed.append([number, duration(point.hours * 3600), cost, _settings(point.variant)])
    below = html.legend([(0, "fits"), (7, "Pareto front"), (8, "does not fit")])
    below += html.table(["front", "time", "cost", "settings"], listed)
    return html.figure(caption, html.plot("Time against cost", 320, shapes, below=42), below + every + problems)


def log_scale(values: Sequence[float], *, down: bool = False) -> Callable[[float], float]:
    """From values to percentages of the picture, logarithmic, at least a factor of four wide. `down`: from the top."""
    low, high = min(values), max(values)
    spare = max(1.15, 2 * math.sqrt(low / high))
    low, high = math.log(low / spare), math.log(high * spare)
    low, high = (high, low) if down else (low, high)
    return lambda value: 100 * (math.log(value) - low) / (high - low)


def _grid(x: Callable[[float], float], y: Callable[[float], float], *, priced: bool) -> list[str]:
    shapes = []
    for name, hours in html.few([(name, hours) for name, hours in _TIMES.items() if 0 <= x(hours) <= 100], 4):
        shapes += [html.line(x(hours), 0, x(hours), 100, "grid"), html.text(x(hours), 100.0, name, anchor="middle", dy=16)]
    costs = (factor * 10.0**power for power in range(-6, 12) for factor in (1, 1.5, 2, 3, 5, 7))
    for value in html.few([value for value in costs if 0 <= y(value) <= 100], 6):
        said = money(value) if priced else two_digits(value)
        shapes += [html.line(0, y(value), 100, y(value), "grid"), html.text("-6", y(value), said, anchor="end", dy=4)]
    shapes.append(html.text(100.0, 100.0, "time of the run", anchor="end", dy=34))
    return [*shapes, html.text("-50", 0.0, "cost" if priced else "device-hours", dy=-8)]


def _labels(spots: Sequence[tuple[float, float, str]]) -> list[str]:
    """Above each spot or below it, where there is room."""
    shapes: list[str] = []
    written: list[tuple[float, float]] = []
    for x, y, said in spots:
        for dy in (-9, 19):
            if all(abs(x - a) > 6 or abs(y + dy / 3.2 - b) > 4 for a, b in written):
                shapes.append(html.text(x, y, said, anchor="middle", kind="strong", dy=dy))
                written.append((x, y + dy / 3.2))
                break
    return shapes


def _settings(variant: Variant) -> str:
    return ", ".join(f"{key} {value}" for key, value in variant.values.items())

"""Line charts for HTML pages, as SVG without scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from lit_llm.core import html_page as html
from lit_llm.core.number_text import count

Points = list[tuple[float, float]]

_HEIGHT = 260
_SCATTERED = ("points", "hollow")
_DOTTED = ("dots", *_SCATTERED)
COLORS = (0, 6, 2, 4, 7, 5, 1, 3)
"""Numbers of the page's colours, in an order in which successive lines of a chart differ most."""
_MOST = 600
"""The most points drawn of a line. A longer line is cut into _MOST / 2 stretches, and the lowest and the highest point of each
stretch are drawn, so that every spike is visible."""
_STRIPS = 60
"""The most vertical strips of a chart. A strip's tooltip shows the values of all lines within the strip."""


class Line(NamedTuple):
    """Record of a curve of a chart. `color`: number of one of the page's colours. `kind`: "" (a line), "dashed", "thin",
    "dots" (points joined by a line), "points" (points without a line) or "hollow" (rings without a line).
    """

    name: str
    color: int
    points: Points
    kind: str = ""
    group: str = ""
    """The legend's entry for all lines with the same group. "": the line has an entry of its own, `name`."""
    label: str = ""
    """A text above each point, for the kinds of lines whose points are drawn. "": no text."""


def chart(
    lines: Sequence[Line],
    *,
    label: str,
    x_name: str,
    text_of_x: Callable[[float], str],
    unit: str = "",
    high: float | None = None,
    columns: Sequence[float] = (),
    keyed: bool = True,
    from_zero: bool = False,
    logarithmic: bool = False,
    logarithmic_x: bool = False,
) -> str:
    """Return the HTML of a line chart with a legend. Values that are not finite are not drawn; the caption gives their number.

    Args:
        label: the name of the y values.
        x_name: the name of the x axis.
        text_of_x: function that formats an x value for the axis.
        unit: the unit of the y values.
        high: the y value, up to rounding of the axis, above which lines are cut off. None: no line is cut off.
        columns: x values that have a label on the axis. If empty: round numbers, or powers of 10 with round exponents.
        from_zero: whether the y axis begins at 0, so that small changes look small.
        logarithmic: whether the y axis is logarithmic; y values that are not above 0 are left out.
        logarithmic_x: whether the x axis is logarithmic; all x values must be above 0.
        keyed: whether a legend names the lines, if there are several lines.
    """
    place_text = text_of_x if columns else _place_text
    if logarithmic:
        lines = [line._replace(points=[(x, math.log10(y)) for x, y in line.points if y > 0]) for line in lines]
    text_of_y = (lambda y: number(float(f"{y:.2g}"))) if logarithmic else _short
    finite = [line._replace(points=[p for p in line.points if math.isfinite(p[0]) and math.isfinite(p[1])]) for line in lines]
    missing = sum(len(line.points) for line in lines) - sum(len(line.points) for line in finite)
    drawn = [line for line in finite if line.points]
    if not drawn:
        return f"<p>{escape(label)}: no finite value was logged.</p>"
    scale = math.log10 if logarithmic_x else float
    low_x, high_x = _ends([scale(x) for line in drawn for x, _ in line.points])
    low_y, high_y = _ends([y for line in drawn for _, y in line.points])
    low_y = min(low_y, 0.0) if from_zero else low_y
    if high is not None and high > low_y:
        high_y = min(high_y, high)
    rows = _powers(low_y, high_y) if logarithmic else html.round_numbers(low_y, high_y, 8)
    if not logarithmic and rows[0] > low_y and len(rows) > 1:  # so that the lowest row is the baseline
        rows = [2 * rows[0] - rows[1], *rows]
    columns = columns or [10**x if logarithmic_x else x for x in _first_too(low_x, html.round_numbers(low_x, high_x, 8))]
    low_y, high_y = min(low_y, rows[0]), max(high_y, rows[-1])

    def across(x: float) -> float:
        return 100 * (scale(x) - low_x) / (high_x - low_x)

    def down(y: float) -> float:
        return 100 * (high_y - y) / (high_y - low_y)

    def said_at(line: Line, x: float, y: float) -> str:
        return escape(f"{line.name}: {number(10**y if logarithmic else y)} at {place_text(x)}")

    axes = []
    shown_rows = [10**y for y in rows] if logarithmic else rows
    for y, said in zip(rows, labels(shown_rows, text_of_y), strict=True):
        axes.append(html.line(0, down(y), 100, down(y), "grid"))
        axes.append(html.text("-6", down(y), said, anchor="end", dy=4))
    axes.append(html.line(0, 100, 100, 100, "base"))
    for x, said in zip(columns, labels(columns, text_of_x), strict=True):
        axes.append(html.text(across(x), 100.0, said, anchor=html.anchor(across(x)), dy=15))
    paths, dots = [], []
    for line in drawn:
        shown = thinned(line.points)
        places = [(across(x), down(y)) for x, y in shown]
        path = "L".join(f"{10 * x:.1f} {10 * y:.1f}" for x, y in places)
        if line.kind not in _SCATTERED:
            paths.append(f'<path class="curve {line.kind}" d="M{path}" stroke="var(--c{line.color})"/>')
        for (x, y), (at, value) in zip(places, shown, strict=True) if line.kind in _DOTTED or len(places) == 1 else ():
            if y < -0.01:
                continue  # cut off
            where = f'class="{line.kind}" cx="{x:.2f}%" cy="{y:.2f}%" r="3.5"'
            drawn_in = "stroke" if line.kind == "hollow" else "fill"
            dots.append(f'<circle {where} {drawn_in}="var(--c{line.color})"><title>{said_at(line, at, value)}</title></circle>')
            if line.label:
                dots.append(html.text(x, y, line.label, anchor=html.anchor(x), kind="strong", dy=-8))
    curves = '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">' + "".join(paths) + "</svg>"
    kinds = ["dots" if line.kind in _DOTTED else "dashed" if line.kind == "dashed" else "line" for line in drawn]
    entries = {
        (line.color, line.group or line.name): "line" if line.group and line.kind not in _SCATTERED else kind
        for line, kind in zip(drawn, kinds, strict=True)
    }
    key = html.legend(list(entries), list(entries.values())) if keyed and len(drawn) > 1 else ""
    strips = _strips([line for line in drawn if line.kind not in _SCATTERED], across, said_at)
    picture = html.plot(f"{label} over {x_name}", _HEIGHT, [*axes, curves, *strips, *dots])
    said = f"{unit}, over {x_name}" if unit else f"over {x_name}"
    if missing:
        said += f". {missing} {'value is' if missing == 1 else 'values are'} not finite and not drawn"
    if high is not None and any(y > high_y for line in drawn for _, y in line.points):
        said += f". Values above {number(high_y)} are cut off"
    return html.figure(said, key + picture)


def _strips(
    lines: Sequence[Line], across: Callable[[float], float], said_at: Callable[[Line, float, float], str]
) -> Iterator[str]:
    """Yield the HTML of invisible vertical strips over a chart. A strip's tooltip has each line's last value within the strip.

    `across`: function from x to its place in percent of the width. `said_at`: returns the tooltip's text for (line, x, y)."""
    many = min(_STRIPS, max((len(line.points) for line in lines), default=0))
    said: dict[int, dict[int, str]] = {}
    for i, line in enumerate(lines if many > 1 else ()):
        for x, y in thinned(line.points):
            at = min(int(across(x) * many / 100), many - 1)
            said.setdefault(at, {})[i] = said_at(line, x, y)
    for at, values in said.items():
        where = f'x="{100 * at / many:.2f}%" y="0" width="{100 / many:.2f}%" height="100%"'
        yield f'<rect class="strip" {where}><title>{"&#10;".join(values.values())}</title></rect>'


def thinned(points: Points) -> Points:
    """Return `points` if these are at most `_MOST`; else the lowest and the highest point of each of `_MOST` / 2 stretches."""
    if len(points) <= _MOST:
        return points
    size = -(-len(points) // (_MOST // 2))
    extremes = []
    for i in range(0, len(points), size):
        stretch = points[i : i + size]
        ends = {stretch.index(min(stretch, key=lambda p: p[1])), stretch.index(max(stretch, key=lambda p: p[1]))}
        extremes += [stretch[j] for j in sorted(ends)]
    return extremes


def labels(values: Sequence[float], text: Callable[[float], str]) -> list[str]:
    """Return `text(value)` for each value; if two of these texts are equal, each value with up to ten digits instead."""
    said = [text(value) for value in values]
    return said if len(set(said)) == len(said) else [f"{value:,.10g}" for value in values]


def number(value: float) -> str:
    """Return the text of a value: four significant digits, or a whole number from 10,000 to 1e9: "3.142", "123,456"."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _place_text(x: float) -> str:
    """Return the text of an x value for a tooltip: a whole number, such as a step, with all digits; others by `number`."""
    return f"{x:,.0f}" if x == int(x) else number(x)


def _short(value: float) -> str:
    """Return the text of a value for the y axis: from a million on like "1.5 M", smaller values by `number`."""
    return count(value) if value >= 1e6 else number(value)


def _powers(low: float, high: float) -> list[float]:
    """Return the decimal logarithms of at most 8 round numbers for a logarithmic axis from 10^`low` to 10^`high`."""
    for digits in ((1, 2, 5), (1,)):
        powers = [math.log10(digit) + power for power in range(math.floor(low), math.ceil(high) + 1) for digit in digits]
        powers = [each for each in powers if low <= each <= high]
        if 1 < len(powers) <= 8:
            return powers
    if len(powers) > 8:
        return html.few(powers, 8)
    return [math.log10(each) for each in html.round_numbers(10**low, 10**high, 8) if each > 0]


def _first_too(first: float, rounded: list[float]) -> list[float]:
    """Return `first`, then the numbers in `rounded` that are so far above `first` that the axis labels do not overlap."""
    room = 0.4 * (rounded[1] - rounded[0]) if len(rounded) > 1 else 0.0
    return [first, *(each for each in rounded if each - first > room)]


def _ends(values: list[float]) -> tuple[float, float]:
    """Return (lowest value, highest value). If both are equal, return two values a little below and above."""
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1))

"""A picture of what benchmarks/transfer.py has measured: loss over the rate, a curve for each width or depth.

    python benchmarks/transfer_plot.py runs/transfer.csv --out docs/evidence/transfer.svg

A row for each optimizer, with and without `model.base_width` and `model.base_depth`. A ring stands at the best rate, by the
parabola through the best measured rate and its neighbours. Where one rate is right for every size, the rings stand in one
column.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from transfer import BASE_DEPTH, BASE_WIDTH, RATES, Results, optimum

WIDE, HIGH, LEFT, TOP = 220, 170, 46, 64
COLORS = ("#9ecae1", "#4292c6", "#08519c", "#041f3d")
"""By size, light to dark; a fill of the page behind them is white in every theme."""
NAMES = {"muon": "MuonAdamW", "adamw": "AdamW"}

Curve = dict[float, float]
"""Loss by log2 of the rate's factor."""


def curves(results: Results, optimizer: str, scaling: str, axis: str) -> dict[int, Curve]:
    """The curve of each width or depth: the mean over seeds. At the base's size the settings change nothing."""
    found: dict[int, dict[float, list[float]]] = {}
    for run, loss in results.losses.items():
        size, other = (run.width, run.depth == BASE_DEPTH) if axis == "width" else (run.depth, run.width == BASE_WIDTH)
        is_base = run.width == BASE_WIDTH and run.depth == BASE_DEPTH
        if run.optimizer == optimizer and other and (run.scaling == scaling or is_base):
            found.setdefault(size, {}).setdefault(run.exponent, []).append(loss)
    return {size: {x: sum(y) / len(y) for x, y in sorted(found[size].items())} for size in sorted(found)}


def panel(title: str, drawn: dict[int, Curve], base_rate: float, low: float, high: float) -> Iterator[str]:
    """One plot, 0 to WIDE and 0 to HIGH, of losses in [low, high]."""
    exponents = [x for curve in drawn.values() for x in curve]
    first, last = min(exponents) - 0.3, max(exponents) + 0.3

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - first) / (last - first) * WIDE, (high - y) / (high - low) * HIGH

    yield f'<text x="0" y="-24" class="t">{escape(title)}</text><rect width="{WIDE}" height="{HIGH}" class="f"/>'
    for exponent in range(round(min(exponents)), round(max(exponents)) + 1):
        x, _ = place(exponent, low)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HIGH}" class="g"/>'
        yield f'<text x="{x:.1f}" y="{HIGH + 14}" class="m">{base_rate * 2**exponent:.2g}</text>'
    for tenth in range(math.ceil(low * 10), math.floor(high * 10) + 1):
        yield f'<text x="-5" y="{place(0, tenth / 10)[1] + 4:.1f}" class="e">{tenth / 10:.1f}</text>'
    for i, (color, (size, curve)) in enumerate(zip(COLORS[: len(drawn)], drawn.items(), strict=True)):
        points = [place(x, y) for x, y in curve.items() if y <= high]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points)
        at = optimum(curve)
        if at is not None:
            x, y = place(at, min(curve.values()))
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="none" stroke="{color}" stroke-width="1.5"/>'
        yield f'<circle cx="{4 + 44 * i}" cy="-10" r="4" fill="{color}"/><text x="{12 + 44 * i}" y="-6">{size}</text>'


def picture(results: Results) -> str:
    panels = []
    rows = [name for name in RATES if any(run.optimizer == name for run in results.losses)]
    for row, optimizer in enumerate(rows):
        losses = [loss for run, loss in results.losses.items() if run.optimizer == optimizer]
        low, high = min(losses) - 0.02, min(losses) + 0.42  # far above, a curve leaves the plot
        for column, (axis, scaling) in enumerate([("width", "on"), ("width", "off"), ("depth", "on"), ("depth", "off")]):
            drawn = curves(results, optimizer, scaling, axis)
            said = f"{NAMES[optimizer]}, {axis}s, {'with' if scaling == 'on' else 'without'} base_{axis}"
            x, y = LEFT + column * (WIDE + LEFT), TOP + row * (HIGH + TOP)
            inside = "".join(panel(said, drawn, RATES[optimizer], low, high)) if drawn else ""
            panels.append(f'<g transform="translate({x},{y})">{inside}</g>')
    wide, high = 4 * (WIDE + LEFT) + 10, len(rows) * (HIGH + TOP) + 24
    style = (
        "text{font:11px sans-serif;fill:#333}.t{font-weight:bold}.m{text-anchor:middle}.e{text-anchor:end}"
        ".f{fill:#fff;stroke:#bbb}.g{stroke:#eee}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
        f'aria-label="Loss over the learning rate by width and depth"><style>{style}</style>'
        f'<rect width="{wide}" height="{high}" fill="#fff"/>{"".join(panels)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results = Results(options.csv[0])
    for further in options.csv[1:]:
        results.losses |= Results(further).losses
    if len({run.steps for run in results.losses}) != 1:
        parser.error("the files must have runs, all with the same number of steps")
    options.out.write_text(picture(results))


if __name__ == "__main__":
    main()

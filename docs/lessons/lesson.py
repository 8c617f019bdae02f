"""Runs the lessons of this folder: what their code prints, their pictures, and the same lessons as notebooks.

    python docs/lessons/lesson.py                         # writes printed blocks and pictures anew
    python docs/lessons/lesson.py --notebooks my-folder   # a notebook for each lesson, with its picture

A page's code is a block whose first line is a comment with the file's name. The block after `It prints:` is its output.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LESSONS = ("loss", "adamw", "memory-and-compute", "schedules", "sick-curves")
PRINTS = "It prints:"
_BLOCK = r"(^    .*\n(?:    .*\n|\n+(?=    ))*)"
_PIECE = re.compile(rf"{_BLOCK}(?:\n{PRINTS}\n\n{_BLOCK})?", re.M)
"""A block, and the block that it prints."""
_WIDE, _HIGH, _LEFT, _TOP = 460, 210, 58, 46
_COLORS = ("#08519c", "#e6550d", "#31a354", "#756bb1", "#888888", "#c51b8a", "#c7a500")

Points = Sequence[tuple[float, float]]


def draw(
    file: str, title: str, curves: dict[str, Points], x: str, y: str, *, high: float = math.inf, log: bool = False
) -> None:
    """Write a picture of curves as SVG, the same bytes for the same points. Points that are not finite are left out.

    Args:
        x, y: names of the axes.
        high: the upper end of the y axis; points above it are left out.
        log: the y axis is logarithmic.
    """
    scale = math.log10 if log else float
    lines = {name: [(a, b) for a, b in points if math.isfinite(b) and b <= high] for name, points in curves.items()}
    all_x, all_y = ([point[i] for points in lines.values() for point in points] for i in (0, 1))
    left, right, low = min(all_x), max(all_x), scale(min(all_y))
    top = scale(high if math.isfinite(high) else max(all_y))

    def at(a: float, b: float) -> str:
        return f"{_WIDE * (a - left) / (right - left):.1f},{_HIGH * (top - scale(b)) / (top - low):.1f}"

    parts = [f'<text x="0" y="-28" class="t">{escape(title)}</text><rect width="{_WIDE}" height="{_HIGH}" class="f"/>']
    for value in _round_numbers(left, right):
        parts.append(f'<text x="{_WIDE * (value - left) / (right - left):.1f}" y="{_HIGH + 16}" class="m">{value:g}</text>')
    if log:  # 1, 2 and 5 times powers of ten
        rows = [v for power in range(-9, 12) for v in (power, power + math.log10(2), power + math.log10(5)) if low <= v <= top]
    else:
        rows = _round_numbers(low, top)
    for value in rows:
        down = _HIGH * (top - value) / (top - low)
        parts.append(f'<line x2="{_WIDE}" y1="{down:.1f}" y2="{down:.1f}" class="g"/>')
        parts.append(f'<text x="-6" y="{down + 4:.1f}" class="e">{10**value if log else value:g}</text>')
    parts.append(f'<text x="{_WIDE / 2:.0f}" y="{_HIGH + 34}" class="m">{escape(x)}</text>')
    parts.append(f'<text x="{-_LEFT + 6}" y="-8">{escape(y)}</text>')
    for i, (color, (name, points)) in enumerate(zip(_COLORS, lines.items(), strict=False)):
        path = " ".join(at(a, b) for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        place = f'x1="{_WIDE + 12}" x2="{_WIDE + 30}" y1="{8 + 20 * i}" y2="{8 + 20 * i}"'
        parts.append(f'<line {place} stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{_WIDE + 36}" y="{12 + 20 * i}">{escape(name)}</text>')
    style = "text{font:11px sans-serif;fill:#333}.t{font-weight:bold}.m{text-anchor:middle}.e{text-anchor:end}"
    style += ".f{fill:#fff;stroke:#bbb}.g{stroke:#eee}"
    box = f'viewBox="0 0 {_WIDE + _LEFT + 190} {_HIGH + _TOP + 44}" role="img" aria-label="{escape(title)}"'
    Path(file).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}><style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<g transform="translate({_LEFT},{_TOP})">{"".join(parts)}</g></svg>\n'
    )


def _round_numbers(low: float, high: float) -> list[float]:
    """Three to eight multiples of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10((high - low) / 3))
    step = max(power * factor for factor in (1, 2, 5) if power * factor <= (high - low) / 3)
    return [round(i * step, 9) for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def pieces(page: str) -> list[tuple[str, str, str | None]]:
    """(text, "", None), and (code, file name, printed output or None) in the order of a page's text."""
    found, end = [], 0
    for match in _PIECE.finditer(page):
        code = re.sub("^    ", "", match[1], flags=re.M)
        if named := re.match(r"# ([\w-]+\.(?:py|yaml))\n", code):
            found += [(page[end : match.start()], "", None)]
            found += [(code, named[1], None if match[2] is None else re.sub("^    ", "", match[2], flags=re.M))]
            end = match.end()
    return [*found, (page[end:], "", None)]


def run(page: str) -> list[str]:
    """Run a page's code in the current folder. Returns what each of its blocks printed."""
    printed = []
    for code, name, _ in pieces(page):
        if name.endswith(".yaml"):
            Path(name).write_text(code)
        elif name:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, name, "exec"), {"__name__": "__main__"})
            printed.append(out.getvalue())
    return printed


def renewed(page: str, printed: list[str]) -> str:
    """The page with what its code has printed."""
    left = iter(printed)
    text = ""
    for code, name, _ in pieces(page):
        text += re.sub("^(?=.)", "    ", code, flags=re.M) if name else code
        if name.endswith(".py"):
            text += f"\n{PRINTS}\n\n" + re.sub("^(?=.)", "    ", next(left), flags=re.M)
    return text


def notebook(page: str) -> dict[str, Any]:
    """The page as a notebook: its text, its code, and what that prints. A YAML file becomes a cell that writes it."""
    cells: list[dict[str, Any]] = []
    for source, name, output in pieces(page):
        if not name:
            cells.append({"cell_type": "markdown", "metadata": {}, "source": source.strip("\n")})
            continue
        source = f"%%writefile {name}\n{source}" if name.endswith(".yaml") else source
        outputs = [{"output_type": "stream", "name": "stdout", "text": output}] if output else []
        cell = {"cell_type": "code", "metadata": {}, "execution_count": None, "source": source.strip("\n"), "outputs": outputs}
        cells.append(cell)
    return {"nbformat": 4, "nbformat_minor": 4, "metadata": {"language_info": {"name": "python"}}, "cells": cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=LESSONS, help=f"of {', '.join(LESSONS)}")
    parser.add_argument("--notebooks", type=Path, help="write notebooks into this folder, and run nothing")
    options = parser.parse_args()
    before = Path.cwd()
    for name in options.names:
        page = HERE / f"{name}.md"
        if options.notebooks:
            options.notebooks.mkdir(parents=True, exist_ok=True)
            (options.notebooks / f"{name}.ipynb").write_text(json.dumps(notebook(page.read_text()), indent=1) + "\n")
            for picture in (Path(__file__), HERE / f"{name}.svg"):
                shutil.copy(picture, options.notebooks)
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            text = renewed(page.read_text(), run(page.read_text()))
            shutil.copy(f"{name}.svg", HERE)
            os.chdir(before)
        page.write_text(text)


if __name__ == "__main__":
    main()

"""HTML for report pages: the document with its style, tables, legends, and pictures in SVG. Functions return HTML as text.

Coordinates are percentages of a picture's width and height, so a picture fits any screen while its text keeps its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple, TypeVar

T = TypeVar("T")

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c2128; --soft: #59636e; --line: #d5dae0; --panel: #f5f7f9;
  --bad: #b42318; --good: #18794e;
  --c0: #3b6fb5; --c1: #8fb4e0; --c2: #2f9068; --c3: #9dd3b4; --c4: #b07cc6; --c5: #6f54a8; --c6: #e8973c; --c7: #cf4a5a;
  --c8: #8b929b; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --text: #e6e9ed; --soft: #a3adb8; --line: #353c45;
  --panel: #1d2229; --bad: #ff8a80; --good: #62d29b; --c0: #5b8fd6; --c1: #35557f; --c2: #3fae80; --c3: #2b6149; --c4: #c493d8;
  --c5: #8d73c7; --c6: #e59a47; --c7: #e0606f; --c8: #747d88; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p, figcaption { margin: .2rem 0 .6rem; color: var(--soft); } code { overflow-wrap: anywhere; font-size: .85rem; }
.flag { display: inline-block; }
figure { margin: 0; } figure + figure { margin-top: 1.5rem; }
.columns { display: grid; gap: 0 2.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.columns > section { min-width: 0; } .columns pre { max-height: 20rem; overflow: auto; }
.key { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0 0; padding: 0; list-style: none; }
.key li { flex: 1 1 auto; background: var(--panel); border-radius: .5rem; padding: .5rem .7rem; color: var(--soft); }
.key b { display: block; font-size: 1.15rem; color: var(--text); } .key .bad b { color: var(--bad); }
.key .good b { color: var(--good); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .5rem 0; padding: 0; list-style: none; font-size: .85rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .4em;
  background: currentColor; }
.legend .line, .legend .dashed { height: 0; border-top: 2px solid; vertical-align: middle; width: 1.4em; }
.legend .dashed { height: 2px; border: 0;
  background: repeating-linear-gradient(90deg, currentColor 0 5px, transparent 5px 8px); }
.legend .dots { border-radius: 50%; width: .6em; height: .6em; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-top: 1px solid var(--line); }
th { font-weight: 600; } td + td { font-variant-numeric: tabular-nums; } details { margin: .5rem 0; }
.figures td, .figures th { white-space: nowrap; } .key + p { margin-top: .8rem; }
.key + .pairs, .scroll + .pairs { margin-top: 1rem; }
.pairs th { width: 11rem; color: var(--soft); font-weight: 400; } .pairs td { overflow-wrap: anywhere; }
@media (max-width: 30rem) { .pairs th, .pairs td { display: block; width: auto; padding-right: 0; }
  .pairs td { border: 0; padding-top: 0; }
  .texts thead { display: none; } .texts td { display: block; border: 0; padding: 0 0 .2rem; }
  .texts td[data-name]::before { content: attr(data-name) ": "; color: var(--soft); }
  .texts tr { display: block; border-top: 1px solid var(--line); padding: .4rem 0; } }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border-radius: .5rem; padding: .5rem .7rem;
  font-size: .8rem; margin: .3rem 0; }
.tabs > section { display: none; }
.tabs > label { margin-right: 1rem; white-space: nowrap; font-size: .85rem; color: var(--soft); }
.tabs > input:nth-of-type(1):checked ~ section:nth-of-type(1), .tabs > input:nth-of-type(2):checked ~ section:nth-of-type(2),
.tabs > input:nth-of-type(3):checked ~ section:nth-of-type(3) { display: block; }
summary { cursor: pointer; color: var(--soft); font-size: .85rem; }
.plot { margin: 1.2rem .3rem 0 3.6rem; } .plot > svg { display: block; width: 100%; overflow: visible; }
svg text { font-size: 12px; fill: var(--soft); } svg .grid { stroke: var(--line); } svg .base { stroke: var(--soft); }
svg .strong { fill: var(--text); paint-order: stroke;
  stroke: var(--page); stroke-width: 3px; }
svg .limit { stroke: var(--bad); stroke-dasharray: 5 4; stroke-width: 1.5; } svg .box { stroke: var(--page); stroke-width: .6; }
svg .idle { fill: var(--panel); } svg .front { stroke: var(--text); stroke-dasharray: 2 3; fill: none; }
svg .curve { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke; } svg .dashed { stroke-dasharray: 5 4; }
svg .thin { stroke-width: .8; opacity: .6; } svg .number { font-size: 10px; fill: #fff; }
svg .strip { fill: transparent; } svg .strip:hover { fill: var(--line); fill-opacity: .5; }
svg .hollow { fill: none; stroke-width: 1.5; }
"""


class Bar(NamedTuple):
    """Record of a bar from time `start` to `stop`. `color`: number of a colour in STYLE; `title`: tooltip; `text`: a label."""

    start: float
    stop: float
    color: int
    title: str
    text: str = ""


def document(title: str, body: Iterable[str], command: str = "") -> str:
    """The text of a whole HTML file, which needs no other file. Characters that UTF-8 cannot encode become "?".

    Args:
        command: the command that made the page. If given, the body begins with the title and this command.
    """
    if command:
        body = [f"<h1>{escape(title)}</h1>", f"<p><code>{unbroken(command)}</code></p>", *body]
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )
    return page.encode(errors="replace").decode()


def unbroken(text: str) -> str:
    """HTML of a text in which a browser does not break lines inside flags such as --data.path."""
    return re.sub(r"\(?--[\w.=,/-]+[);,]*", r'<span class="flag">\g<0></span>', escape(text))


def heading(text: str) -> str:
    """HTML of the heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def columns(parts: Iterable[tuple[str, str]]) -> str:
    """HTML of sections, each (title or "", HTML of the content), side by side where the window is wide enough."""
    sections = (f"<section>{heading(title) if title else ''}{content}</section>" for title, content in parts)
    return f'<div class="columns">{"".join(sections)}</div>'


def keys(figures: Sequence[tuple[str, str, str]]) -> str:
    """HTML list of important numbers, each (label, value, kind). The kind, "good", "bad" or "", sets the value's colour."""
    items = (f'<li class="{kind}">{escape(label)}<b>{escape(value)}</b></li>' for label, value, kind in figures)
    return f'<ul class="key">{"".join(items)}</ul>'


def pairs(rows: Sequence[tuple[str, ...]]) -> str:
    """HTML table with two columns, whose rows are (label, text)."""
    cells = "".join(f'<tr><th scope="row">{escape(label)}</th><td>{unbroken(text)}</td></tr>' for label, text in rows)
    return f'<table class="pairs">{cells}</table>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, summary: str = "", kind: str = "") -> str:
    """HTML table. With `summary` the table is folded, and a click on the summary opens it.

    Args:
        kind: "figures": a cell is one line. "texts": on a narrow screen, a row's cells stand below each other. "": neither.
    """
    names = [f' data-name="{escape(name)}"' if kind == "texts" and name else "" for name in header]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    cells = ("".join(f"<td{name}>{unbroken(cell)}</td>" for name, cell in zip(names, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    of_kind = f' class="{kind}"' if kind else ""
    markup = f'<div class="scroll"><table{of_kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<details><summary>{escape(summary)}</summary>{markup}</details>" if summary else markup


def legend(entries: Iterable[tuple[int, str]], kinds: Sequence[str] = ()) -> str:
    """HTML legend of entries (number of a colour, text). `kinds`: "line", "dots" or "dashed" per entry. Empty: squares."""
    items = (
        f'<li><i class="{kinds[i] if kinds else ""}" style="color:var(--c{color})"></i>{escape(text)}</li>'
        for i, (color, text) in enumerate(entries)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def figure(caption: str, picture: str, below: str = "") -> str:
    """HTML of a picture with its caption above, and the HTML `below` under the picture."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}{below}</figure>"


def tabs(name: str, parts: Sequence[tuple[str, str]]) -> str:
    """HTML of at most three tabs, (label, HTML of the content), of which one is visible at a time. `name`: unique in a page."""
    name = escape(name)
    buttons = (
        f'<input type="radio" name="{name}" id="{name}-{i}"{" checked" if i == 0 else ""}><label for="{name}-{i}">'
        f"{escape(label)}</label>"
        for i, (label, _) in enumerate(parts)
    )
    sections = (f"<section>{content}</section>" for _, content in parts)
    return f'<div class="tabs">{"".join(buttons)}{"".join(sections)}</div>'


def preformatted(text: str) -> str:
    """HTML that shows a text with its line breaks and spaces."""
    return f"<pre>{escape(text)}</pre>"


def plot(label: str, height: int, shapes: Iterable[str], *, below: int = 20) -> str:
    """HTML of a picture of SVG `shapes`, as wide as the page allows, `height` pixels high, plus `below` pixels for text."""
    drawn = "".join(shapes)
    return (
        f'<div class="plot" style="padding-bottom:{below}px"><svg role="img" aria-label="{escape(label)}" height="{height}">'
        f"{drawn}</svg></div>"
    )


def areas(columns: Sequence[tuple[float, Sequence[float]]], colors: Sequence[int], top: float) -> str:
    """SVG of stacked areas. `columns`: (width, each area's value, from the bottom). `top`: the sum that fills the height."""
    whole = sum(width for width, _ in columns)
    paths = []
    for layer in range(len(colors)):
        upper, lower, x = [], [], 0.0
        for width, values in columns:
            low, high = (1000 * (1 - sum(values[: layer + each]) / top) for each in (0, 1))
            for at in (x, x + width):
                upper.append(f"{1000 * at / whole:.1f} {high:.1f}")
                lower.append(f"{1000 * at / whole:.1f} {low:.1f}")
            x += width
        path = f"M{'L'.join(upper + lower[::-1])}Z"
        paths.append(f'<path d="{path}" fill="var(--c{colors[layer]})"/>')
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">{"".join(paths)}</svg>'


def lanes(label: str, rows: Sequence[tuple[str, Sequence[Bar]]], end: float, ticks: Sequence[tuple[float, str]]) -> str:
    """HTML picture of bars on lanes, over time 0 to `end`. `rows`: (name, bars) of each lane. `ticks`: (time, text) labels."""
    pitch = max(8, min(30, 420 // len(rows)))
    every = -(-14 // pitch)  # number of lanes that a line of text needs
    shapes = []
    for i, (name, bars) in enumerate(rows):
        y, height = i * pitch + 1, pitch - 2
        shapes.append(f'<rect class="idle" x="0" y="{y}" width="100%" height="{height}"/>')
        for bar in bars:
            x, width = 100 * bar.start / end, 100 * (bar.stop - bar.start) / end
            shapes.append(
                f'<rect class="box" x="{x:.3f}%" y="{y}" width="{width:.3f}%" height="{height}" fill="var(--c{bar.color})">'
                f"<title>{escape(bar.title)}</title></rect>"
            )
            if bar.text:
                shapes.append(text(x + width / 2, f"{y + height / 2:g}", bar.text, anchor="middle", kind="number", dy=4))
        if i % every == 0:
            shapes.append(text("-6", f"{y + height / 2:g}", name, anchor="end", dy=4))
    height = len(rows) * pitch
    for value, name in ticks:
        place = 100 * value / end
        shapes.append(text(place, 100.0, name, anchor=anchor(place), dy=15))
    return plot(label, height, shapes)


def text(x: float | str, y: float | str, said: str, *, anchor: str = "start", kind: str = "", dy: float = 0) -> str:
    """SVG of the text `said` at (x, y), moved down by `dy` pixels. x and y: number in percent of the picture, str in pixels."""
    where = " ".join(f'{name}="{v if isinstance(v, str) else f"{v:.2f}%"}"' for name, v in (("x", x), ("y", y)))
    return f'<text class="{kind}" {where} dy="{dy:g}" text-anchor="{anchor}">{escape(said)}</text>'


def anchor(place: float) -> str:
    """The SVG text anchor with which a text at `place`, in percent of the picture's width, stays inside the picture."""
    return "start" if place < 12 else "end" if place > 88 else "middle"


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """SVG of a line from (x1, y1) to (x2, y2), in percent of the picture. `kind` is a CSS class of STYLE."""
    return f'<line class="{kind}" x1="{x1:.2f}%" y1="{y1:.2f}%" x2="{x2:.2f}%" y2="{y2:.2f}%"/>'


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """At most `most` evenly spaced round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) < most - 1)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 1)]


def few(elements: list[T], most: int) -> list[T]:
    """At most `most` of `elements`: the first, and others at equal distances in the list."""
    return elements[:: max(1, -(-len(elements) // most))]

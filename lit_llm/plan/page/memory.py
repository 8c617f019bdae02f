"""The picture of a step's memory."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from lit_llm.core import html_page as html
from lit_llm.plan.memory import Memory, usable_bytes
from lit_llm.plan.micro_batch import micro_batch
from lit_llm.plan.numbers import size
from lit_llm.plan.passes import Operation
from lit_llm.plan.plan import Plan

PARTS = (
    "weights", "optimizer state", "gradients", "weight copies", "communication buffers", "optimizer work", "activations",
    "loss head",
)  # fmt: skip
"""From the bottom up, in the order of the colours; further ones are on top."""
_OPTIMIZER_WIDTH = 0.06
_LEAST_WIDTH = 0.004


def timeline(memory: Memory) -> list[Operation]:
    """The peak of each operation of the step, with all that is in memory beside it."""
    found, moments = [], iter(memory.moments)
    for step in memory.steps:
        made = micro_batch(replace(step, timeline=True))
        of_phases = {phase: next(moments)[1] for phase in made.peaks}
        if not made.timeline:  # a custom model that cannot be traced
            found += [Operation(phase, parts, 0) for phase, parts in of_phases.items()]
        beside = {phase: Counter(parts) for phase, parts in of_phases.items()}
        for phase, peak in made.peaks.items():
            beside[phase].subtract(peak)
        for operation in made.timeline:
            live = Counter(operation.live)
            live.update(beside[operation.phase])
            found.append(operation._replace(live=dict(live)))
    return found + [Operation(phase, parts, 0) for phase, parts in moments]


def memory_figure(plan: Plan) -> str:
    """Memory over a step, stacked by part, and its tables."""
    memory, operations = plan.memory, timeline(plan.memory)
    names = [name for name in PARTS if any(o.live.get(name) for o in operations)]
    names += sorted({name for o in operations for name in o.live} - set(PARTS))
    colors = [PARTS.index(name) if name in PARTS else len(PARTS) for name in names]
    widths = _widths(operations)
    peak, limit = memory.total, None if plan.capacity_bytes is None else usable_bytes(plan.hardware)
    top = 1.08 * (max(memory.needed, limit) if limit is not None and limit < 2.5 * peak else memory.needed)
    columns = [(width, [o.live.get(name, 0) for name in names]) for width, o in zip(widths, operations, strict=True)]
    unit, factor = ("GB", 1e9) if top >= 1e9 else ("MB", 1e6)
    shapes = []
    for value in html.round_numbers(0, top / factor, 7):
        y = 100 * (1 - value * factor / top)
        shapes += [html.line(0, y, 100, y, "grid"), html.text("-6", y, f"{value:g} {unit}", anchor="end", dy=4)]
    shapes.append(html.areas(columns, colors, top))
    shapes += _phases(operations, widths, memory)
    place = max(range(len(operations)), key=lambda i: sum(operations[i].live.values()))
    at, high = 100 * (sum(widths[:place]) + widths[place] / 2), 100 * (1 - peak / top)
    one_side, other = (0.5, 99.5) if at < 50 else (99.5, 0.5)  # of the picture, where the peak is and where not
    where = "the rank that needs most" if plan.settings.layout.devices > 1 else "the device"
    caption = f"A step on {where}, operation by operation. "
    caption += "Widths are shares of the FLOPs; the update has a fixed one. Sizes are those at the peak."
    if plan.settings.layout.pipeline.ranks > 1:
        caption += " Of a pipeline: action by action. A step of many micro-batches repeats its middle, which is drawn shorter."
    if memory.reserved is not None:
        caption += " CUDA's allocator reserves more than it has allocated."
        shapes += _level(memory.reserved, top, f"reserved {memory.reserved / factor:.3g} {unit}", "front", other)
    if limit is not None and limit <= top:
        shapes += _level(limit, top, f"usable {limit / factor:.3g} {unit}", "limit", one_side)
    elif limit is not None:
        caption += f" The device has {size(limit)}, above the picture."
    shapes.append(f'<circle cx="{at:.2f}%" cy="{high:.2f}%" r="3.5" fill="var(--text)"/>')
    shapes.append(html.text(at, high, f"peak {peak / factor:.3g} {unit}", anchor=html.anchor(at), kind="strong", dy=-7))
    picture = html.plot(f"Memory of a step, peak {size(peak)}", 260, shapes, below=42)
    shown = html.legend(
        (color, f"{name} {round(memory.parts.get(name, 0) / factor, 3):.3g} {unit}")
        for color, name in zip(colors, names, strict=True)
    )
    header = ["bytes at the peak of", *names, "total"]
    rows = [[_named(i, memory), *_cells(parts, names)] for i, (_, parts) in enumerate(memory.moments)]
    every = [[f"{i + 1}. {o.phase}", *_cells(o.live, names)] for i, o in enumerate(operations)]
    tables = html.table(header, rows, summary="Phases in bytes") + html.table(header, every, summary="Operations in bytes")
    return html.figure(caption, picture, shown + tables)


def _level(size: float, top: float, said: str, kind: str, x: float) -> list[str]:
    """A line across the picture, and what it is."""
    y = 100 * (1 - size / top)
    return [html.line(0, y, 100, y, kind), html.text(x, y, said, anchor=html.anchor(x), kind="strong", dy=-5)]


def _widths(operations: list[Operation]) -> list[float]:
    """Shares of the picture's width."""
    flops = sum(o.flops for o in operations) or 1
    widths = [o.flops / flops + _LEAST_WIDTH for o in operations]
    widths[-1] = _OPTIMIZER_WIDTH * sum(widths)
    return [width / sum(widths) for width in widths]


def _phases(operations: list[Operation], widths: list[float], memory: Memory) -> list[str]:
    """Names of phases below the picture, where there is room, and of micro-batches below these."""
    shapes, x, begin = [], 0.0, 0.0
    for i, operation in enumerate(operations):
        x += widths[i]
        if i + 1 < len(operations) and operations[i + 1].phase == operation.phase:
            continue
        if i + 1 == len(operations):
            shapes.append(html.text(100.0, 100.0, "update", anchor="end", dy=32))
        elif x - begin > 0.13:
            shapes.append(html.text(50 * (begin + x), 100.0, operation.phase, anchor="middle", dy=15))
        begin = x
    if len(memory.steps) == 2:
        flops = [*itertools.accumulate(o.flops for o in operations)]  # the two have equally many
        half = 100 * sum(width for width, done in zip(widths, flops, strict=True) if 2 * done <= flops[-1])
        for middle, said in ((half / 2, "first micro-batch"), ((half + 100 * (1 - widths[-1])) / 2, "later ones")):
            shapes.append(html.text(middle, 100.0, said, anchor="middle", dy=32))
        shapes.append(html.line(half, 0, half, 100, "grid"))
    return shapes


def _named(i: int, memory: Memory) -> str:
    of_each = (len(memory.moments) - 1) // max(1, len(memory.steps))
    later = len(memory.steps) == 2 and i < len(memory.moments) - 1
    return memory.moments[i][0] + (f", {('first', 'later')[i // of_each]} micro-batch" if later else "")


def _cells(live: dict[str, int], names: list[str]) -> list[str]:
    return [*(f"{live.get(name, 0):,}" for name in names), f"{sum(live.values()):,}"]

"""The HTML page of a plan: charts of the memory and time of a step, and tables of all figures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from lit_llm.core import html_page as html
from lit_llm.core.html_page import Bar
from lit_llm.core.number_text import count, duration, percent, size
from lit_llm.distributed.pipeline_order import bubble
from lit_llm.plan.memory import Memory, usable_bytes
from lit_llm.plan.micro_batch import micro_batch
from lit_llm.plan.plan import Plan
from lit_llm.plan.segments import Operation
from lit_llm.plan.speed import update_bytes
from lit_llm.reporting.charts import COLORS as LINE_COLORS
from lit_llm.reporting.charts import Line, chart
from lit_llm.reporting.pipeline_timetable import DURATION, timetable
from lit_llm.reporting.plan_text import devices, sections


def plan_page(plan: Plan, command: str) -> str:
    """Return the whole HTML page of a plan. `command`: the command that made the plan."""
    title = f"Plan: {count(plan.parameters)} parameters on {devices(plan)}"
    short, *others = sections(plan)
    body = [html.pairs(short.rows)]
    body += [html.heading("Memory of a step"), memory_figure(plan)]
    body += [html.heading("Time of a step"), step_figures(plan)]
    if (rates := plan.settings.schedule.rates) is not None:
        body += [html.heading("Learning rate"), rate_figure(plan, rates)]
    for section in others:
        table = html.table(section.header, section.rows) if section.header else html.pairs(section.rows)
        body += [html.heading(section.title), table]
    return html.document(title, body, command)


def rate_figure(plan: Plan, rates: Callable[[int], dict[str, float]]) -> str:
    """Return a chart of the learning rates `rates(step)` over the run: exact at the ends of phases and at 400 even steps."""
    ends = {1, *itertools.accumulate(phase.steps for phase in plan.phases)}
    drawn = {step: rates(step) for step in sorted(ends | {1 + i * plan.settings.max_steps // 400 for i in range(400)})}
    lines = [
        Line(name, color, [(step, by_name[name]) for step, by_name in drawn.items()])
        for name, color in zip(drawn[1], itertools.cycle(LINE_COLORS), strict=False)
    ]
    return chart(lines, label="Learning rate", x_name="optimizer steps", text_of_x=count, from_zero=True)


# -- memory -----------------------------------------------------------------------------------------------------------

PARTS = (
    "weights", "optimizer state", "gradients", "weight copies", "communication buffers", "optimizer work", "activations",
    "loss head",
)  # fmt: skip
"""Parts of the memory from the bottom of the chart to the top, in the order of the colours. Other parts are above them."""
_OPTIMIZER_WIDTH = 0.06
_LEAST_WIDTH = 0.004


def timeline(memory: Memory) -> list[Operation]:
    """Return the operations of a step in order. `Operation.live` has {part: bytes in memory at the operation's peak}."""
    operations, moments = [], iter(memory.moments)
    for step in memory.steps:
        batch = micro_batch(step)
        of_phases = {phase: next(moments)[1] for phase in batch.peaks}
        if not batch.timeline:  # a custom model that cannot be traced
            operations += [Operation(phase, parts, 0) for phase, parts in of_phases.items()]
        beside = {phase: Counter(parts) for phase, parts in of_phases.items()}
        for phase, peak in batch.peaks.items():
            beside[phase].subtract(peak)
        for operation in batch.timeline:
            live = Counter(operation.live)
            live.update(beside[operation.phase])
            operations.append(operation._replace(live=dict(live)))
    return operations + [Operation(phase, parts, 0) for phase, parts in moments]


def memory_figure(plan: Plan) -> str:
    """Return the HTML of a chart of the memory during a step, stacked by part, with a legend."""
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
    one_side, other = (0.5, 99.5) if at < 50 else (99.5, 0.5)  # x of labels on the side of the peak, and on the other
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
    return html.figure(caption, picture, shown)


def _level(size: float, top: float, said: str, kind: str, x: float) -> list[str]:
    """Return a line at the height of `size` bytes in a chart that ends at `top` bytes, and its label `said` at x = `x` %."""
    y = 100 * (1 - size / top)
    return [html.line(0, y, 100, y, kind), html.text(x, y, said, anchor=html.anchor(x), kind="strong", dy=-5)]


def _widths(operations: list[Operation]) -> list[float]:
    """Return each operation's share of the chart's width: by its FLOPs, but fixed for the last operation, the update."""
    flops = sum(o.flops for o in operations) or 1
    widths = [o.flops / flops + _LEAST_WIDTH for o in operations]
    widths[-1] = _OPTIMIZER_WIDTH * sum(widths)
    return [width / sum(widths) for width in widths]


def _phases(operations: list[Operation], widths: list[float], memory: Memory) -> list[str]:
    """Return the texts below a chart: names of phases, where there is room, and below these, names of micro-batches."""
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
        flops = [*itertools.accumulate(o.flops for o in operations)]  # both micro-batches have equally many FLOPs
        half = 100 * sum(width for width, done in zip(widths, flops, strict=True) if 2 * done <= flops[-1])
        for middle, said in ((half / 2, "first micro-batch"), ((half + 100 * (1 - widths[-1])) / 2, "later ones")):
            shapes.append(html.text(middle, 100.0, said, anchor="middle", dy=32))
        shapes.append(html.line(half, 0, half, 100, "grid"))
    return shapes


# -- time -------------------------------------------------------------------------------------------------------------

COLORS = {
    "forward": 0, "recomputation": 1, "backward": 2, "gradients of inputs": 2, "gradients of weights": 3, "optimizer": 5,
    "exposed communication": 7, "hidden communication": 4, "pipeline bubble": 8, "slowest rank": 6,
}  # fmt: skip
MOST_BOXES = 6000
"""The most boxes (tasks) in the chart of a pipeline. For more tasks, fewer micro-batches are drawn."""


def parts_of_step(plan: Plan) -> dict[str, float]:
    """Return {cause: seconds} of a step, in the order of execution. The seconds add up to the step.

    The computing time (`Times.compute`) includes the optimizer, whose memory traffic is assumed to have full bandwidth. Of the
    computing time without optimizer and recomputation, the forward passes take a third, the backward passes two thirds.
    """
    times, options = plan.times, plan.options
    assert times.compute is not None and times.step is not None
    bandwidth = plan.hardware.memory_gbps
    on_device = 0.0 if plan.host_bytes else update_bytes(plan.settings)
    updating = 0.0 if bandwidth is None else min(times.compute, on_device / (bandwidth * 1e9))
    again = (times.compute - updating) * (1 - 1 / times.recomputation)
    passes = times.compute - updating - again
    waiting = times.step * (1 - 1 / options.slowest_rank)
    idle = times.step - waiting - times.compute - times.exposed - times.host
    parts = {
        "forward": passes / 3,
        "recomputation": again,
        "backward": passes * 2 / 3,
        "exposed communication": times.exposed,
        "pipeline bubble": idle,
        "optimizer": updating + times.host,
        "slowest rank": waiting,
    }
    return {name: seconds for name, seconds in parts.items() if seconds > 1e-9 * times.step}


def step_figures(plan: Plan) -> str:
    """Return the HTML of a chart of a step's time by cause and, with a pipeline, a chart of the tasks of each rank."""
    times, micro_batches = plan.times, plan.settings.accumulation
    if times.step is None:
        return html.figure("The time is unknown: the hardware table has no dense peak for this precision.", "")
    parts = parts_of_step(plan)
    ends = itertools.accumulate(parts.values())
    bars = [
        Bar(end - seconds, end, COLORS[name], f"{name}: {duration(seconds)}")
        for (name, seconds), end in zip(parts.items(), ends, strict=True)
    ]
    computed = sum(parts.get(name, 0.0) for name in ("forward", "recomputation", "backward"))
    rows = [("compute", bars)]
    hidden = (times.communication or 0.0) - times.exposed
    shown = dict(parts)
    if times.communication:
        sent = [Bar(computed, computed + times.exposed, COLORS["exposed communication"], f"exposed: {duration(times.exposed)}")]
        if hidden > 1e-9 * times.step:
            behind = Bar(max(0.0, computed - hidden), computed, COLORS["hidden communication"], f"hidden: {duration(hidden)}")
            sent.insert(0, behind)
            shown["hidden communication"] = hidden
        rows.append(("network", sent))
    caption = f"A step of {duration(times.step)} by cause. "
    caption += f"Its {micro_batches} micro-batches are drawn together. " if micro_batches > 1 else ""
    caption += "Communication is drawn in one piece; hidden communication overlaps with computing." * bool(times.communication)
    marks = [(0.0, "0"), (times.step / 2, duration(times.step / 2)), (times.step, duration(times.step))]
    picture = html.lanes(f"A step of {duration(times.step)}", rows, times.step, marks)
    entries = html.legend(
        (COLORS[name], f"{name} {duration(seconds)}, {percent(seconds / times.step)}") for name, seconds in shown.items()
    )
    return html.figure(caption, picture, entries) + (_pipeline(plan) if plan.settings.layout.pipeline.ranks > 1 else "")


def _pipeline(plan: Plan) -> str:
    layout, micro_batches = plan.settings.layout.pipeline, plan.settings.accumulation
    assert plan.times.step is not None
    drawn = micro_batches
    while drawn > layout.stages and 3 * drawn * layout.stages > MOST_BOXES:
        drawn = drawn // 2
        while not layout.runs(drawn):
            drawn += 1
    boxes = timetable(layout, drawn)
    end = max(box.stop for box in boxes)
    rows: list[tuple[str, list[Bar]]] = [(f"rank {rank}", []) for rank in range(layout.ranks)]
    for rank, (kind, stage, number), start, stop in boxes:
        said = f"{kind}, micro-batch {number + 1}, stage {stage + 1}"
        rows[rank][1].append(Bar(start, stop, COLORS[kind], said, str(number + 1) if end <= 40 else ""))
    idle = percent(bubble(layout, micro_batches))
    caption = f"Schedule {layout.schedule}: {layout.ranks} ranks, {layout.stages} stages, {micro_batches} micro-batches"
    caption += f", of which {drawn} are drawn" if drawn != micro_batches else ""
    caption += f". Idle: {idle} of the step. Stages take equal times; the order is torch's."
    seconds = plan.times.step
    marks = [(0.0, "0"), (end / 2, duration(seconds / 2)), (end, duration(seconds))] if drawn == micro_batches else []
    picture = html.lanes(f"Pipeline with schedule {layout.schedule}, {idle} idle", rows, end, marks)
    kinds = [kind for kind in DURATION if any(box.task.kind == kind for box in boxes)]
    return html.figure(caption, picture, html.legend((COLORS[kind], kind) for kind in kinds))

"""The pictures of a step's time: what it computes, what it sends, and the pipeline."""

from __future__ import annotations

from lit_llm.core import html_page as html
from lit_llm.core.html_page import Bar
from lit_llm.plan.numbers import duration, percent
from lit_llm.plan.optimizer import state_bytes
from lit_llm.plan.page.schedule import DURATION, idle_share, played
from lit_llm.plan.pipeline import bubble
from lit_llm.plan.plan import Plan
from lit_llm.plan.rank_traffic import fullest_stage
from lit_llm.plan.settings import BYTES
from lit_llm.plan.weights import stored_bytes

COLORS = {
    "forward": 0, "recomputation": 1, "backward": 2, "gradients of inputs": 2, "gradients of weights": 3, "optimizer": 5,
    "exposed communication": 7, "hidden communication": 4, "pipeline bubble": 8, "slowest rank": 6,
}  # fmt: skip
MOST_BOXES = 6000
"""Of a picture."""
_MOST_DRAWN = 12
"""Micro-batches."""


def parts_of_step(plan: Plan) -> dict[str, float]:
    """Seconds by cause, in their order. They add up to the step.

    The MFU is that of the whole step, so the optimizer is a part of the computing time: its memory traffic at full bandwidth.
    Of the rest, a backward pass takes twice the time of a forward pass.
    """
    times, options = plan.times, plan.options
    assert times.compute is not None and times.step is not None
    updating = min(times.compute, _optimizer_seconds(plan))
    again = (times.compute - updating) * (1 - 1 / times.recomputation)
    passes = times.compute - updating - again
    waiting = times.step * (1 - 1 / options.slowest_rank)
    idle = times.step - waiting - times.compute - times.exposed
    found = {
        "forward": passes / 3,
        "recomputation": again,
        "backward": passes * 2 / 3,
        "exposed communication": times.exposed,
        "pipeline bubble": idle,
        "optimizer": updating,
        "slowest rank": waiting,
    }
    return {name: seconds for name, seconds in found.items() if seconds > 1e-9 * times.step}


def step_figures(plan: Plan) -> str:
    """The step's parts, and with a pipeline its ranks."""
    if plan.times.step is None:
        return html.figure("The time is unknown: the hardware table has no dense peak for this precision.", "")
    ranks = plan.settings.layout.pipeline.ranks
    return _whole(plan) + (_pipeline(plan) if ranks > 1 else "")


def _whole(plan: Plan) -> str:
    times, parts, count = plan.times, parts_of_step(plan), plan.settings.accumulation
    assert times.step is not None
    repeated = [name for name in parts if name in ("forward", "recomputation", "backward")]
    drawn = count if count <= _MOST_DRAWN else 1
    bars: list[Bar] = []
    at = 0.0
    for i in range(drawn):
        for name in repeated:
            stop = at + parts[name] / drawn
            which = f", micro-batch {i + 1}" if drawn > 1 else ""
            bars.append(Bar(at, stop, COLORS[name], f"{name}{which}: {duration(stop - at)}"))
            at = stop
    computed = at
    for name in [each for each in parts if each not in repeated]:
        bars.append(Bar(at, at + parts[name], COLORS[name], f"{name}: {duration(parts[name])}"))
        at += parts[name]
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
    caption += f"Its {count} micro-batches are drawn {'one by one' if drawn > 1 else 'together'}. " if count > 1 else ""
    caption += "Communication is drawn in one piece; hidden communication overlaps with computing." * bool(times.communication)
    marks = [(0.0, "0"), (times.step / 2, duration(times.step / 2)), (times.step, duration(times.step))]
    picture = html.lanes(f"A step of {duration(times.step)}", rows, times.step, marks)
    entries = html.legend((COLORS[name], f"{name} {duration(seconds)}") for name, seconds in shown.items())
    cells = [[name, f"{seconds:.6g}", percent(seconds / times.step)] for name, seconds in shown.items()]
    below = html.table(["cause", "seconds", "of the step"], cells, summary="Seconds by cause")
    return html.figure(caption, picture, entries + below)


def _pipeline(plan: Plan) -> str:
    layout, count = plan.settings.layout.pipeline, plan.settings.accumulation
    assert plan.times.step is not None
    drawn = count
    while drawn > layout.stages and 3 * drawn * layout.stages > MOST_BOXES:
        drawn = drawn // 2
        while not layout.runs(drawn):
            drawn += 1
    boxes = played(layout, drawn)
    end = max(box.stop for box in boxes)
    rows: list[tuple[str, list[Bar]]] = [(f"rank {rank}", []) for rank in range(layout.ranks)]
    for rank, (kind, stage, number), start, stop in boxes:
        said = f"{kind}, micro-batch {number + 1}, stage {stage + 1}"
        rows[rank][1].append(Bar(start, stop, COLORS[kind], said, str(number + 1) if end <= 40 else ""))
    share, formula = idle_share(boxes), bubble(layout, drawn)
    caption = f"Schedule {layout.schedule}: {layout.ranks} ranks, {layout.stages} stages, {count} micro-batches"
    caption += f", of which {drawn} are drawn" if drawn != count else ""
    caption += f". Idle: {percent(share)} of the picture; the formula says {percent(formula)}"
    caption += f", and {percent(bubble(layout, count))} for the whole step. " if drawn != count else ". "
    caption += "Stages take equal times; the order is torch's."
    seconds = plan.times.step
    marks = [(0.0, "0"), (end / 2, duration(seconds / 2)), (end, duration(seconds))] if drawn == count else []
    picture = html.lanes(f"Pipeline with schedule {layout.schedule}, {percent(share)} idle", rows, end, marks)
    kinds = [kind for kind in DURATION if any(box.task.kind == kind for box in boxes)]
    cells = []
    for rank, (name, bars) in enumerate(rows):
        busy = sum(bar.stop - bar.start for bar in bars) / end
        cells.append([name, ", ".join(str(stage + 1) for stage in layout.stages_of(rank)), percent(busy), percent(1 - busy)])
    below = html.legend((COLORS[kind], kind) for kind in kinds)
    return html.figure(caption, picture, below + html.table(["rank", "stages", "busy", "idle"], cells, summary="Ranks"))


def _optimizer_seconds(plan: Plan) -> float:
    """Memory traffic of clipping and the update: gradients, weights and state are read, and written where they change."""
    settings, bandwidth = plan.settings, plan.hardware.memory_gbps
    if bandwidth is None:
        return 0.0
    weight_bytes, divisor = BYTES[settings.precision][0], settings.layout.divisor("optimizer")
    local = fullest_stage(settings, settings.layout.tensor_parallel)
    moved = 5 * stored_bytes(local, weight_bytes, trainable=True) + 2 * state_bytes(settings.optimizer, local, weight_bytes)
    return moved / divisor / (bandwidth * 1e9)

"""The HTML page of a plan: its pictures hold the figures of the plan, and the file needs nothing else."""

import itertools
import random
import re
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import pytest

from lit_llm.core.mesh_sizes import MeshSizes
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallel_layout import layout_of_name, mesh_layout
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.config import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.plan import Layout, Optimizer, Options, PlannedRun, find, make_plan, sweep
from lit_llm.plan.planned_run import Schedule
from lit_llm.reporting.pipeline_timetable import DURATION, timetable
from lit_llm.reporting.plan_page import parts_of_step, plan_page, timeline
from lit_llm.reporting.plan_sweep_page import Point, pareto_front, points_of, sweep_page
from lit_llm.reporting.plan_text import markdown

MODEL = GPTConfig(n_layer=8, n_head=4, n_embd=64, block_size=64, vocab_size=512)
ADAMW = Optimizer("AdamW", fused=True)
VOID = {"meta"}
COMMAND = "python -m lit_llm plan --config 'a<script>&.yaml' --devices 4"


def run(**changes) -> PlannedRun:
    return PlannedRun(MODEL, ADAMW, **{"max_steps": 100, "global_batch_size": 16, "micro_batch_size": 2, **changes})


class Page(HTMLParser):
    """Checks that tags are closed, and collects attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def pages():
    rising = Schedule("Own", lambda step: step / 100)
    pipeline = run(layout=mesh_layout(MeshSizes(pipeline=4), PipelineLayout(4, "zbv")), micro_batch_size=1, schedule=rising)
    yield plan_page(make_plan(pipeline, find("h100-sxm"), Options(slowest_rank=1.1)), COMMAND)
    yield plan_page(make_plan(run(precision="32-true"), find("cpu")), COMMAND)  # without times
    ddp, axes = partial(layout_of_name, "ddp"), sweep.parse(["devices=1,2,3,8"])
    found = list(sweep.variants(axes, run(), ddp, find("a100-40gb"), Options()))
    yield sweep_page(found, found[0], COMMAND)


@pytest.mark.slow
def test_a_page_is_one_file_that_needs_no_other_and_holds_text_as_text():
    for text in pages():
        page = Page(text)
        names = {name for name, _ in page.tags}
        assert {"html", "meta", "title", "style", "svg", "table"} <= names and not names & {"script", "link", "img", "iframe"}
        for _, attributes in page.tags:
            assert not {"src", "href", "xlink:href"} & attributes.keys()
        assert "url(" not in text and "@import" not in text and "http" not in text
        assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [
            a for n, a in page.tags if n == "meta"
        ]
        assert "prefers-color-scheme: dark" in text
        assert "<script" not in text and "a<script>&.yaml" in "".join(page.texts)
        assert all(a.get("aria-label") for n, a in page.tags if n == "svg" and "role" in a)


LAYOUTS = {
    "one": run(),
    "one micro-batch": run(micro_batch_size=16),
    "ddp": run(layout=layout_of_name("ddp", 4, 8)),
    "fsdp2": run(
        layout=layout_of_name("fsdp2", 4, 8),
        precision="bf16-mixed",
        compute=ComputeConfig("full"),
        loss=LossConfig(chunk_size=64),
    ),
    "offload": run(layout=Layout("mesh", shard=4, cpu_offload=True)),
    "1f1b": run(layout=Layout("mesh", pipeline=PipelineLayout(4)), micro_batch_size=1),
    "interleaved": run(layout=Layout("mesh", pipeline=PipelineLayout(2, "interleaved1f1b"))),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_highest_point_of_the_memory_is_the_peak_of_the_plan(name):
    plan = make_plan(LAYOUTS[name], find("h100-sxm"))
    drawn = timeline(plan.memory)
    highest = max(drawn, key=lambda operation: sum(operation.live.values()))
    assert {part: size for part, size in highest.live.items() if size} == plan.memory.parts
    assert highest.phase == plan.memory.moment and drawn[-1].phase == "optimizer step"
    if name.startswith("one"):  # embedding, 8 blocks, norm, loss; the same backward; the update
        micro_batches = 1 if name == "one micro-batch" else 2
        assert len(drawn) == micro_batches * 2 * 11 + 1
        assert sum(operation.flops for operation in drawn[:22]) == sum(operation.flops for operation in drawn[-23:-1])


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (3, 9), (4, 16), (8, 32)])
def test_the_idle_share_of_a_drawn_pipeline_is_the_formula(ranks, micro_batches):
    waits, m = ranks - 1, micro_batches
    work = {"gpipe": m, "1f1b": m, "interleaved1f1b": 2 * m, "zbv": 6 * m, "dualpipev": 3 * m}
    for schedule, units in work.items():
        layout = PipelineLayout(ranks, schedule)
        if not layout.runs(m):
            continue
        boxes = timetable(layout, m)
        busy, end = sum(box.stop - box.start for box in boxes), max(box.stop for box in boxes)
        assert 1 - busy / (ranks * end) == pytest.approx(waits / (units + waits)), schedule
        for rank in range(ranks):  # one after the other
            own = sorted((box.start, box.stop) for box in boxes if box.rank == rank)
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
        # each stage does everything for each micro-batch once, and the forward passes follow each other
        work_of = {(box.task.stage, box.task.micro_batch): 0 for box in boxes}
        ends = {box.task: box.stop for box in boxes}
        for box in boxes:
            work_of[box.task.stage, box.task.micro_batch] += box.stop - box.start
            assert box.stop - box.start == DURATION[box.task.kind] and layout.rank_of(box.task.stage) == box.rank
            if box.task.kind == "forward" and box.task.stage:
                assert ends[box.task._replace(stage=box.task.stage - 1)] <= box.start
        assert len(work_of) == layout.stages * m and set(work_of.values()) == {3}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_of_a_step_add_up_to_it(name):
    plan = make_plan(LAYOUTS[name], find("a100-80gb"), Options(slowest_rank=1.2))
    parts = parts_of_step(plan)
    assert sum(parts.values()) == pytest.approx(plan.times.step) and min(parts.values()) > 0
    assert parts["backward"] == pytest.approx(2 * parts["forward"])
    assert parts["slowest rank"] == pytest.approx(plan.times.step / 6)
    assert ("recomputation" in parts) == (name == "fsdp2") and ("pipeline bubble" in parts) == (name in ("1f1b", "interleaved"))
    alone = make_plan(replace(LAYOUTS[name], layout=Layout("single")), find("a100-80gb"))
    assert "exposed communication" not in parts_of_step(alone)


def test_the_curve_of_the_rate_has_a_line_for_each_peak_and_the_ends_of_phases():
    def rate(step: int) -> float:  # 30 of 100,000 steps of warmup: between two of 400 even steps
        return min(step / 30, 1 - step / 200_000)

    settings = run(
        max_steps=100_000, schedule=Schedule("Own", rate, lambda step: {"lr": 3 * rate(step), "lr/vector": rate(step)})
    )
    page = Page(plan_page(make_plan(settings, find("h100-sxm")), COMMAND))
    paths = [tag["d"] for name, tag in page.tags if name == "path" and "curve" in tag.get("class", "")]
    places = [[tuple(map(float, place.split())) for place in path[1:].split("L")] for path in paths]
    assert len(places) == 2 and {"lr", "lr/vector"} <= set(page.texts)
    for points, peak in zip(places, (3, 1), strict=True):
        heights = [round(1 - y / 1000, 3) for _, y in points]  # of the highest row, 3
        assert max(heights) == pytest.approx(peak / 3, abs=2e-3) and heights.index(max(heights)) < 3  # at step 30
        assert heights[-1] == pytest.approx(peak / 6, abs=2e-3) and points[-1][0] == 1000  # at the last step


def test_the_pareto_front_is_that_of_all_pairs():
    chance = random.Random(0)
    variant = sweep.Variant({}, None)
    for size in (1, 2, 40):
        points = [Point(variant, chance.randint(1, 12), chance.randint(1, 12), chance.random() < 0.7) for _ in range(size)]
        usable = [p for p in points if p.fits]

        def beaten(p, usable=usable):
            return any(q.hours <= p.hours and q.cost <= p.cost and q[1:3] != p[1:3] for q in usable)

        expected = sorted((p.hours, p.cost) for p in usable if not beaten(p))
        assert [(p.hours, p.cost) for p in pareto_front(points)] == expected


def test_the_picture_of_a_sweep_has_each_variant_with_its_settings():
    axes = sweep.parse(["devices=1,2,8"])
    found = list(sweep.variants(axes, run(), partial(layout_of_name, "ddp"), find("a100-40gb"), Options()))
    page = Page(sweep_page(found, found[1], COMMAND))
    assert [tag for tag, _ in page.tags].count("circle") == len(points_of(found)) == 3
    front = pareto_front(points_of(found))
    titles = [text for text in page.texts if " at " in text and "devices" in text]
    assert sum(text[0].isdigit() for text in titles) == len(front) and len(titles) == 3
    assert {"1 device", "2 devices", "8 devices"} <= set(page.texts), "a colour for each number of devices"
    labels = [text for text in page.texts if re.fullmatch(r"\d( chosen)?|chosen", text)]
    assert len(labels) >= len(front) and any("chosen" in text for text in labels)


def test_the_plan_names_the_micro_batch_that_makes_a_step_shorter():
    hardware = find("h100-sxm")
    small = make_plan(run(micro_batch_size=1), hardware)
    fast = make_plan(run(micro_batch_size=small.largest_micro_batch), hardware)
    assert (
        small.faster_micro_batch == (small.largest_micro_batch, fast.times.step) and fast.times.step < 0.99 * small.times.step
    )
    assert f"--data.micro_batch_size {small.largest_micro_batch} " in markdown(small)
    assert fast.faster_micro_batch is None and "to save time" not in markdown(fast)

"""What a reader of a run sees first: in TensorBoard's event files, and in a real browser."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from recipe_runs import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

TWO_LAYERS = ("--model.n_layer", "2", "--validation.every_n_steps", "1")


def test_the_events_of_a_run_begin_with_its_losses_and_have_no_layers(folder, capsys):
    assert run(capsys, "fit", "--config", "tiny.yaml", *TWO_LAYERS)[0] == 0
    events = EventAccumulator("runs/tiny").Reload()
    tags = sorted(events.Tags()["scalars"])
    assert tags[:2] == ["Loss/train", "Loss/validation"] and {"train/loss", "val/loss"} < set(tags)
    assert not any("blocks." in tag for tag in tags) and "health/update_ratio/median" in tags
    assert '"health/update_ratio/blocks.1.mlp"' in Path("runs/tiny/metrics.jsonl").read_text(), "which the doctor reads"
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    charts = {chart.title: chart.multiline.tag for category in layout.category for chart in category.chart}
    assert [title for title, drawn in charts.items() if not any(re.match(tag, name) for tag in drawn for name in tags)] == []
    assert [category.title for category in layout.category] == ["quality", "health", "speed"]


DEEP = """
const all = (root, selector) => [...root.querySelectorAll('*')].flatMap(
    each => [...(each.matches(selector) ? [each] : []), ...(each.shadowRoot ? all(each.shadowRoot, selector) : [])]);
const visible = each => { const box = each.getBoundingClientRect(); return box.height > 0 && box.bottom < innerHeight; };
"""
"""`all` finds elements in web components, too; `visible` are those that nobody has to scroll to."""


def shown(browser: Browser, expression: str, least: int = 1) -> list:
    """The list of an expression that uses `DEEP`, as soon as it has `least` members."""
    return browser.wait_for(f"(() => {{ {DEEP} const found = {expression}; return found.length >= {least} && found; }})()")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_a_browser_shows_the_losses_first(folder, capsys):
    assert run(capsys, "fit", "--config", "tiny.yaml", *TWO_LAYERS)[0] == 0
    assert run(capsys, "report", "--run", "runs/tiny", "--out", "report.html")[0] == 0
    board = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        address = next(found[0] for line in board.stderr if (found := re.search(r"http://\S+", line)))
        with Browser(folder / "profile") as browser:
            browser.open(address)
            cards = (
                "all(document, 'scalar-card').filter(visible).map(each => each.querySelector('tb-truncated-path').textContent)"
            )
            assert shown(browser, cards, 2) == ["Loss/train", "Loss/validation"]

            browser.open(f"{address}#custom_scalars")
            titles = "all(document, '.heading-label').filter(visible).map(each => each.innerText)"
            assert shown(browser, titles, 2)[:2] == ["validation loss", "training loss"]
            # A curve is a path in the coordinates of its chart; what lies outside is cut off.
            paths = "all(all(document, 'vz-line-chart2')[0].shadowRoot, 'path.line').map(path => path.getAttribute('d'))"
            curve = shown(browser, f"{paths}.filter(Boolean)")
            heights = [float(point.split(",")[1]) for point in re.split("[ML]", curve[0])[1:]]
            assert sum(0 <= height <= 180 for height in heights) >= 4, "not blank"

            browser.open((folder / "report.html").as_uri())
            assert shown(browser, "all(document, 'h2').filter(visible).map(each => each.innerText)")[0] == "Loss"
            begins = "all(document, 'svg path.curve').map(each => each.getBoundingClientRect().top / innerHeight)"
            assert shown(browser, begins)[0] < 0.9
    finally:
        board.kill()
        board.wait()

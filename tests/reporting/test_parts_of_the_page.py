"""What the page says of cost, model, data and time: by known records."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
from launches import LAUNCH
from recipe_runs import run

from lit_llm.reporting.health_charts import health_charts
from lit_llm.reporting.run_curves import RunCurves
from lit_llm.reporting.summary import cost, described, planned_cost, short_cost
from lit_llm.reporting.time_spent import time_spent
from lit_llm.runs import load


def launch(first_step: int, **values: object) -> dict:
    """What plan.json has of a launch with a price of $2 to $4 for each of 3 devices, for half an hour."""
    return {
        **LAUNCH,
        "started": f"2026-01-01T00:00:{first_step:02d}+00:00",
        "first_step": first_step,
        "devices": 3,
        "price_usd_hour": [2.0, 4.0],
        "settings": {"model": {"n_layer": 1, "n_head": 8, "n_kv_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 5000}},
        "predicted": {"run_seconds": 7200.0},
        "measured": {"trained_seconds": 1800.0},
        **values,
    }


def made(folder: Path, rows: list[dict], *launches: dict, config: str = "trainer: {max_steps: 9}\n") -> RunCurves:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"time": float(row["step"]), **row}) + "\n" for row in rows))
    (folder / "plan.json").write_text(json.dumps({"format": 1, "launches": launches}))
    return RunCurves(load(folder), "a")


def test_cost_is_that_of_all_launches_and_the_plan_that_of_the_first(tmp_path):
    launches = made(tmp_path / "a", [], launch(0), launch(3)).launches
    # 2 launches · 0.5 h · 3 devices · $2 to $4; planned: 2 h · 3 · $2 to $4
    assert cost(launches) == "$6.0 to $12 for 60 min on 3 x h100-sxm"
    assert planned_cost(launches) == "$12 to $24 for 2.0 h on 3 x h100-sxm"
    assert planned_cost(launches[1:]) == "", "the earlier steps are not in its plan"
    older = made(tmp_path / "b", [], launch(0, price_usd_hour=None), launch(3)).launches
    assert cost(older) == "$3.0 to $6.0 for 30 min on 3 x h100-sxm; 1 of 2 launches recorded a price"
    assert (short_cost(older), short_cost(launches)) == ("$3.0 to $6.0 (1 of 2 launches)", "$6.0 to $12")


def test_the_last_loss_is_said_in_bits_beside_gzip_and_xz(tmp_path):
    row = {"step": 1, "val/loss": 2.0, "val/bits_per_byte": 0.9}
    assert "compression" not in dict(described(made(tmp_path / "a", [{"step": 1, "train/loss": 2.0}])))
    assert "no tokenizer" in dict(described(made(tmp_path / "b", [{"step": 1, "val/loss": 2.0}])))["compression"]
    alone = dict(described(made(tmp_path / "c", [row])))["compression"]
    assert alone.startswith("0.900 bits per byte, 2.885 bits per token;") and "not compared" in alone  # 2 / ln 2
    both = row | {"val/gzip_bits_per_byte": 2.25, "val/xz_bits_per_byte": 1.75}
    assert "gzip 2.250 and xz 1.750" in dict(described(made(tmp_path / "d", [both])))["compression"]


def test_without_a_known_price_no_cost_is_said(tmp_path):
    said = dict(described(made(tmp_path / "a", [], launch(0, price_usd_hour=None))))
    assert "cost" not in said and "planned cost" not in said
    assert said["model"] == "1 layer, width 64, 8 heads (2 for keys and values), context 32; vocabulary 5,000"


def test_model_and_data_are_described(tmp_path):
    config = """
model: {n_layer: 2, n_head: 4, n_embd: 8, block_size: 16, vocab_size: null, norm: rmsnorm}
init_from: runs/base
lora: {rank: 4}
data:
  class_path: lit_llm.data.TextFiles
  init_args: {paths: [a, b, c, d, e], tokenizer: {class_path: lit_llm.tokenizers.BPE}, global_batch_size: 32}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.002}}
schedule: {class_path: lit_llm.callbacks.Cosine}
trainer: {precision: bf16-mixed}
"""
    rows = [{"step": 1, "setup/train_tokens": 2000.0, "progress/tokens": 500.0}]
    said = described(made(tmp_path / "a", rows, config=config))
    assert said == [
        ("model", "2 layers, width 8, 4 heads, context 16; rmsnorm; from the weights of runs/base; LoRA of rank 4"),
        ("data", "TextFiles; paths: a, b, c and 2 more; tokenizer BPE; 2 k training tokens, 0.25 epochs"),
        ("training", "AdamW, learning rate 0.002; Cosine; 32 sequences a step; bf16-mixed"),
    ]


def row(step: int, time: float, **values: float) -> dict:
    return {"step": step, "time": time, "progress/tokens": 10.0 * step, **{k.replace("__", "/"): v for k, v in values.items()}}


def test_shares_of_the_time_are_weighted_by_the_time_between_rows(tmp_path):
    rows = [
        row(1, 0.0),
        row(2, 10.0, time__forward_fraction=0.5, time__validation_fraction=0.5),
        row(3, 40.0, time__forward_fraction=0.7, time__validation_fraction=0.3),
    ]
    seconds, measured_by = time_spent(made(tmp_path / "a", rows))
    assert measured_by == "TimeBreakdown"
    assert seconds == pytest.approx({"forward": 0.5 * 10 + 0.7 * 30, "validation": 0.5 * 10 + 0.3 * 30})


def test_without_a_breakdown_the_time_outside_of_steps_is_what_the_speed_leaves_over(tmp_path):
    rows = [
        row(1, 0.0),
        row(11, 10.0, throughput__tokens_per_second=20.0, time__data_fraction=0.2),  # 100 tokens: 5 s, 1 s of them waiting
        row(41, 40.0, throughput__tokens_per_second=10.0, time__data_fraction=0.0),  # 300 tokens: all of the 30 s
        row(42, 41.0),
    ]
    seconds, _ = time_spent(made(tmp_path / "a", rows))
    assert seconds == pytest.approx({"training steps": 4 + 30, "waiting for data": 1, "validation, saving and samples": 5})
    assert time_spent(made(tmp_path / "b", [row(1, 0.0), row(2, 1.0)])) is None


def test_signals_of_layers_are_their_highest_median_and_lowest(tmp_path):
    ratios = {1: [0.1, 0.001, 0.01], 5: [0.4, 0.2, math.nan]}
    rows = [
        {
            "step": step,
            **{f"health/update_ratio/{i}": str(v).replace("nan", "NaN") if v != v else v for i, v in enumerate(values)},
        }
        for step, values in ratios.items()
    ]
    ((title, chart),) = health_charts(made(tmp_path / "a", rows))
    assert title == "Update / weight norm" and "layers, logarithmic" in chart
    paths = [part.split('"')[0] for part in chart.split(' d="M')[1:]]
    ends = [[float(point.split()[1]) for point in path.split("L")] for path in paths]
    # lines: highest, median, lowest; three decades from 0.4 to 0.001
    height = 1000 / (math.log10(0.4) + 3)
    for found, values in zip(ends, ((0.1, 0.4), (0.01, 0.3), (0.001, 0.2)), strict=True):
        assert found == pytest.approx([height * (math.log10(0.4) - math.log10(v)) for v in values], abs=0.5)
    # With TensorBoard alone, a run has these three in place of its layers.
    sorted_rows = [sorted(v for v in values if not math.isnan(v)) for values in ratios.values()]
    summed_up = [
        {"step": step, **dict(zip((f"health/update_ratio/{w}" for w in ("lowest", "median", "highest")), v, strict=True))}
        for step, v in zip(
            ratios, ([low, statistics.median([low, *rest]), rest[-1]] for low, *rest in sorted_rows), strict=True
        )
    ]
    assert list(health_charts(made(tmp_path / "b", summed_up))) == [(title, chart)]


def page_of(tmp_path, capsys, *rows: dict, name: str = "metrics.jsonl") -> str:
    """The page of a run without settings."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text("".join(json.dumps({"time": 10.0 * each["step"], **each}) + "\n" for each in rows))
    assert run(capsys, "report", "--run", str(folder), "--out", str(tmp_path / "page.html"))[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=|<script|<link|@import|url\(", page)
    return page


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>([^<]*)</h2>", page)


def test_a_page_of_preferences_shows_margin_accuracy_rewards_and_kl_and_losses_per_pair(tmp_path, capsys):
    names = ("loss", "margin", "accuracy", "reward_chosen", "reward_rejected", "kl")
    rows = [
        {"step": step, **{f"{split}/{name}": step + i / 8 for i, name in enumerate(names)}}
        for step in (1, 9)
        for split in (("train", "val") if step == 9 else ("train",))
    ]
    page = page_of(tmp_path, capsys, *rows)
    assert [title.partition(":")[0] for title in titles(page)[:5]] == [
        "Loss",
        "Margin",
        "Accuracy",
        "Rewards",
        "KL from the reference",
    ]
    loss, kl = (page.split(f"<h2>{title}</h2>")[1].split("</section>")[0] for title in ("Loss", "KL from the reference"))
    assert "mean per pair, over steps" in loss and "per token" not in loss and "nats per token, over steps" in kl
    assert "margin<b>9.125</b>" in page and "accuracy<b>9.25</b>" in page and "KL<b>9.625</b>" in page
    assert "<title>training: 1 at 1</title>" in loss, "a value where the pointer is"


def test_a_page_of_a_mixture_shows_the_loss_of_each_source(tmp_path, capsys):
    row = {"train/loss": 3.0, "train/perplexity": 20.1, "train/web/loss": 2.0, "train/code/loss": 4.0, "val/web/loss": 1.5}
    page = page_of(tmp_path, capsys, {"step": 1, **row}, {"step": 2, **row})
    assert titles(page)[:3] == ["Loss", "Training loss by source", "Validation loss by source"]
    by_source = page.split("<h2>Training loss by source</h2>")[1].split("</section>")[0]
    assert re.findall(r"</i>([^<]+)</li>", by_source) == ["code", "web"] and "nats per token" in by_source
    assert "<title>code: 4 at 1&#10;web: 2 at 1</title>" in by_source

"""`report --compare` of folders with known rows: order, settings, effects, and what is left out."""

import csv
import json
import math
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from launches import LAUNCH
from recipe_runs import run

from lit_llm.reporting.comparison_page import t_quantile

CONFIG = """
run_dir: {name}
seed_everything: {seed}
model: {{n_layer: 2, dropout: 0.0}}
optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: {lr}, weight_decay: 0.1}}}}
spike_guard: {guard}
samples: {samples}
trainer: {{max_steps: 40}}
"""


def made(folder: str, lr: float, losses: dict[int, float | str], *, guard: str = "null", seed: int = 1, **last: float) -> Path:
    """A run with validation losses, bits per byte of half the loss, and training losses above them, more so at higher rates."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(CONFIG.format(name=folder, lr=lr, guard=guard, seed=seed, samples=seed))
    rows = [{"step": step, "time": float(step), "train/loss": loss, "val/loss": loss} for step, loss in losses.items()]
    for row in rows:
        if isinstance(row["val/loss"], float):
            row["train/loss"] += lr / 1000
            row["val/bits_per_byte"] = row["val/loss"] / 2
    if rows:
        rows[-1].update(last)
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Ten runs that ended, at rates 1e-4 · 2^i with loss 3 + (i - 6)², and four that did not."""
    monkeypatch.chdir(tmp_path)
    for i in range(10):
        made(f"sweep/r{i}", 1e-4 * 2**i, {1: 60.0, 40: 3.0 + (i - 6) ** 2}, seed=i)
    guard = "{class_path: lit_llm.callbacks.SpikeGuard, init_args: {sigma: 6}}"
    made("sweep/dead", 0.01, {1: 60.0, 20: 0.5}, guard=guard)
    made("sweep/nan", 9.0, {1: 60.0, 20: "NaN", 40: "NaN"})
    made("sweep/empty", 0.02, {})
    (tmp_path / "sweep/notes").mkdir()
    (tmp_path / "sweep/readme.txt").touch()
    return tmp_path


def compare(capsys, *arguments: str) -> tuple[int, str, str, str]:
    code, out, err = run(capsys, "report", *arguments, "--out", "page.html", "--replace", "true")
    page = Path("page.html").read_text() if code == 0 else ""
    assert not re.search(r"(src|href)=|<script|<link|@import|url\(", page)
    return code, out, err, page


def section(page: str, title: str) -> str:
    return page.split(f"<h2>{title}</h2>")[1].split("<h2>")[0]


def cells(page: str) -> list[list[str]]:
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def test_runs_are_ranked_and_those_that_did_not_end_come_last_by_name(sweep, capsys):
    code, out, _, page = compare(capsys, "--compare", "sweep")
    order = sorted(range(10), key=lambda i: (i - 6) ** 2)
    expected = [f"{n}. r{i}: val/bits_per_byte {(3 + (i - 6) ** 2) / 2:.4f} after step 40" for n, i in enumerate(order, 1)]
    assert (code, out.splitlines()[:10]) == (0, expected)
    assert out.splitlines()[10:13] == [
        "11. dead: val/bits_per_byte 0.2500 after step 20",
        "–. empty: no finite val/bits_per_byte after step 0",
        "–. nan: no finite val/bits_per_byte after step 40",
    ]
    assert out.splitlines()[13].startswith("note: r6 is ahead of r5 by 0.5 (0.33 of its loss)")  # 2.0 and 1.5
    more = ["dead has 20 of 40 steps: it runs, was stopped, or died.", "empty has logged nothing."]
    assert out.splitlines()[14:] == [  # three, the most surprising ones
        "note: nan diverged: its training loss is nan, and not finite from step 20 on.",
        f"note: {more[0]}",
        "1 more note in the page.",
        "Wrote page.html. Open it in a browser.",
    ]
    first, opened = page.split("<h2>")[0].split("<details>")
    assert first.count("</p>") == 1 + 3 and more[0] in first and more[1] not in first and more[1] in opened
    head, *rows = cells(section(page, "Ranking"))
    # What only changes where files go, or whether samples are written, is no column; nor is a setting of the class of only one.
    settings = ["optimizer.lr", "spike_guard"]
    assert sorted(head[4:-4]) == sorted([*settings, "seed_everything"]) and head[:4] == [
        "",
        "run",
        "bits per byte",
        "validation loss",
    ]
    lr, guard = head.index("optimizer.lr"), head.index("spike_guard")
    assert [row[1] for row in rows] == [*(f"r{i}" for i in order), "dead", "empty", "nan"]
    assert [row[lr] for row in rows[:3]] == ["0.0064", *(f"{1e-4 * 2**i:.4g}" for i in order[1:3])]
    assert [row[guard] for row in rows[9:12]] == ["null", "SpikeGuard", "null"]
    assert [row[-1].partition(":")[0] for row in rows if row[1] == "nan"] == ["1"], "doctor's findings are counted"
    legend = re.findall(r"</i>(.*?)</li>", section(page, "Loss").split("<figure>")[1])
    assert legend == [f"r{i}" for i in order[:8]]


def test_the_effect_of_a_setting_is_drawn_on_a_logarithmic_axis(sweep, capsys):
    page = compare(capsys, "--compare", "sweep")[3]
    charts = section(page, "Final loss by setting").split("<figure>")[1:]
    assert len(charts) == 1, "the seed's size means nothing"
    assert "over optimizer.lr (logarithmic)" in charts[0]
    (best,) = re.findall(r'<path class="curve[^"]*" d="M([^"]*)"', charts[0])
    places = [float(point.split()[0]) for point in best.split("L")]
    assert places == [pytest.approx(1000 * i / 9, abs=0.1) for i in range(10)], "a constant factor is a constant distance"
    assert "<title>r6: 1.5 at 0.0064</title>" in charts[0] and "dead" not in charts[0] and "nan" not in charts[0]


def test_a_small_range_has_a_linear_axis_and_settings_that_change_together_one_chart(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        path = made(f"s/r{i}", 0.1 * (i + 1), {40: 1.0 + i})
        (path / "config.yaml").write_text((path / "config.yaml").read_text() + f"loss: {{z_loss: {0.1 * (i + 1)}}}\n")
    page = compare(capsys, "--compare", "s/r0", "s/r1", "s/r2")[3]
    (chart,) = section(page, "Final loss by setting").split("<figure>")[1:]
    assert "over optimizer.lr = loss.z_loss<" in chart
    (best,) = re.findall(r'<path class="curve[^"]*" d="M([^"]*)"', chart)
    assert [float(point.split()[0]) for point in best.split("L")] == [0.0, pytest.approx(500, abs=0.1), 1000.0]


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 11, 20, 100])
def test_five_percent_lie_beyond_the_quantile_of_student(freedom):
    """Integrates the density numerically, over x = t / sqrt(freedom) = tan(angle)."""
    bounds = np.linspace(0, np.arctan(t_quantile(freedom) / freedom**0.5), 100_001)
    middle = (bounds[1:] + bounds[:-1]) / 2
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    within = 2 * scale * (np.cos(middle) ** (freedom - 1)).sum() * bounds[1]
    assert 1 - within == pytest.approx(0.05, abs=0.0008)


def test_a_small_lead_of_one_seed_at_the_end_of_a_sweep_is_called_that(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, loss in enumerate((4.008, 4.004, 4.0)):
        made(f"s/r{i}", 0.1 * 2**i, {40: loss})

    def notes() -> list[str]:
        _, out, _, page = compare(capsys, "--compare", "s")
        found = [line.removeprefix("note: ") for line in out.splitlines() if line.startswith("note: ")]
        assert all(f"<p>{each}</p>" in page for each in found)
        return found

    lead, end = notes()  # bits per byte: 2.004, 2.002, 2.0
    assert lead.startswith("r2 is ahead of r1 by 0.002 (0.001 of its loss)") and "--seed_everything" in lead
    assert "lowest or highest value tried of optimizer.lr 0.4" in end
    other = made("s/r2c", 0.8, {40: 3.999}) / "config.yaml"  # another optimizer, whose rates are no sequel of AdamW's
    other.write_text(other.read_text().replace("AdamW", "SGD"))
    assert not any("value tried" in note for note in notes())
    shutil.rmtree("s/r2c")
    made("s/r2b", 0.4, {40: 4.004}, seed=2)
    lead, _ = notes()  # r2: mean 2.001, of one setting with two seeds
    quantile = math.tan(0.475 * math.pi)  # of Cauchy's distribution: one degree of freedom
    chance = quantile * statistics.stdev([2.0, 2.002]) * math.sqrt(1 / 2 + 1)
    assert f"by 0.001 (0.0005 of its loss): less than the {chance:.2g} that seeds explain" in lead
    made("s/r3", 0.8, {40: 4.1})
    made("s/r2b", 0.4, {40: 4.0002}, seed=2)
    (lead,) = notes()  # 0.4 is inside now
    assert f"more than the {quantile * statistics.stdev([2.0, 2.0001]) * math.sqrt(1 / 2 + 1):.2g} that seeds" in lead


def test_runs_that_differ_by_seed_are_one_setting_with_mean_and_spread(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses = {1: 3.0, 2: 3.25, 3: 3.5, 4: 3.0}
    for seed, loss in losses.items():
        made(f"s/a{seed}", 0.1, {1: 8.0 + seed, 40: loss}, seed=seed)
    made("s/copy", 0.1, {1: 9.0, 40: 3.0}, seed=1)  # equal curves count once
    for seed in (1, 2):
        made(f"s/b{seed}", 0.2, {1: 9.0, 40: 3.0 + seed / 10}, seed=seed)
    _, out, _, page = compare(capsys, "--compare", "s")
    bits = np.array(list(losses.values())) / 2
    spread = f"{bits.mean():.4f} ± {bits.std(ddof=1):.2g}"
    assert out.splitlines()[:2] == [
        f"1. b1, b2: val/bits_per_byte 1.5750 ± {np.std([1.55, 1.6], ddof=1):.2g} after step 40",
        f"2. a1, a2, a3 and 2 more: val/bits_per_byte {spread} after step 40",
    ]
    head, *rows = cells(section(page, "Ranking"))
    assert [row[1] for row in rows] == ["b1, b2 × 2 seeds", "a1, a2, a3 and 2 more × 4 seeds"]
    assert rows[1][head.index("seed_everything")] == "1, 2, 3, 4" and rows[1][2] == spread
    drawn = section(page, "Loss").split("<section>")[1]
    paths = re.findall(r'class="curve ([a-z]*)" d="M[^"]*" stroke="var\(--c(\d)\)"', drawn)
    colors = [color for kind, color in paths if kind == "thin"]  # training and validation of each curve, and their means
    assert sorted(map(colors.count, set(colors))) == [2 * 2, 2 * 4] and len(paths) == 12 + 4
    assert {color for _, color in paths} == set(colors), "a colour for each setting"
    means = re.findall(r"mean of (\S+),[^:]*: training: ([\d.]+) at (\d+)", drawn)  # of both settings, where the pointer is
    expected = {("b1", 1): 9, ("b1", 40): 3.15, ("a1", 1): 10.5, ("a1", 40): 2 * bits.mean()}
    assert {(name, int(x)): float(y) for name, y, x in means} == pytest.approx(expected, abs=1e-3)


def test_a_seed_that_was_run_twice_with_other_curves_is_no_second_seed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, loss in (("a", 3.0), ("b", 3.5)):
        made(f"s/{name}", 0.1, {40: loss})
    out = compare(capsys, "--compare", "s")[1]
    assert out.splitlines()[:-1] == [
        f"{i}. {n}: val/bits_per_byte {v:.4f} after step 40" for i, n, v in ((1, "a", 1.5), (2, "b", 1.75))
    ]


def test_settings_with_equal_curves_are_drawn_once_and_called_without_effect(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(2):
        path = made(f"s/r{i}", 0.1, {1: 5.0, 40: 3.0})
        (path / "config.yaml").write_text((path / "config.yaml").read_text() + f"loss: {{z_loss: {i}.0}}\n")
    _, out, _, page = compare(capsys, "--compare", "s")
    assert "note: r0 and r1 have equal curves" in out
    assert section(page, "Loss").split("<section>")[1].count('class="curve') == 2, "training and validation"


DATA = """
data:
  class_path: lit_llm.data.TextFiles
  init_args: {{train: {train}, val: {val}, tokenizer: {{class_path: T, init_args: {{n: {n}}}}}}}
"""


@pytest.mark.parametrize(
    ("others", "ranked"),
    [
        ({"train": "other.txt"}, True),
        ({"val": "other.txt"}, False),
        ({"n": 2}, True),  # by bits per byte of the same bytes
        ({"n": 2, "bits": False}, False),
        ({"val": "copy.txt", "gzip": (2.5, 2.5)}, True),  # the same bytes in another place
        ({"gzip": (2.5, 3.5)}, False),  # the file has changed
        ({"limit": 5}, False),  # of the batches of that text
        ({"objective": "{class_path: lit_llm.training.preference.Preference, init_args: {loss: dpo, beta: 0.1}}"}, False),
        ({"objective": "{class_path: lit_llm.training.distillation.Distillation, init_args: {weight: 0.5}}"}, True),
    ],
    ids=str,
)
def test_only_runs_of_the_same_task_and_held_out_bytes_are_ranked(tmp_path, capsys, monkeypatch, others, ranked):
    monkeypatch.chdir(tmp_path)
    for i, (name, facts) in enumerate({"a": {}, "b": others}.items()):
        facts = {"train": "a.txt", "val": "v.txt", "n": 1, "gzip": None, "bits": True, "objective": "null"} | facts
        path = made(f"s/{name}", 0.1, {40: 3.0 + i})
        rows = path / "metrics.jsonl"
        if others.get("gzip"):
            rows.write_text(rows.read_text().replace("}", f', "val/gzip_bits_per_byte": {others["gzip"][i]}}}'))
        if not facts["bits"]:
            rows.write_text(rows.read_text().replace("val/bits_per_byte", "other"))
        text = DATA.format(**facts) + f"objective: {facts['objective']}\n"
        config = (path / "config.yaml").read_text()
        limited = f"max_steps: 40, limit_val_batches: {facts.get('limit', 'null')}"
        (path / "config.yaml").write_text(config.replace("max_steps: 40", limited) + text)
    code, out, _, page = compare(capsys, "--compare", "s")
    first = [line.partition(":")[0] for line in out.splitlines() if re.match(r"\S+ [ab]:", line)]
    assert code == 0 and first == (["1. a", "2. b"] if ranked else ["–. a", "–. b"])
    assert ("note: These are 2 rankings" in out) != ranked
    assert out.count("after step 40 (no place: no other run has this task, text and tokenizer)") == (0 if ranked else 2)
    assert len(re.findall("<h2>Ranking", page)) == (1 if ranked else 2)


def test_losses_of_different_kinds_are_not_compared_nor_is_the_length_of_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    added = {"dpo": "objective: {init_args: {loss: dpo}}\n", "sft": "", "longer": ""}
    for i, (name, text) in enumerate(added.items()):
        path = made(f"s/{name}", 0.1, {40: 1.0 + i})
        config = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(config.replace("trainer: {", f"trainer: {{max_epochs: {i + 2}, ") + text)
    out = compare(capsys, "--compare", "s")[1].splitlines()
    assert "task dpo:" in out and "task cross-entropy:" in out and sum("ahead" in line for line in out) == 1
    notes = [line for line in compare(capsys, "--compare", "s/sft", "s/longer")[1].splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and "sft is ahead" in notes[0]


def test_without_bits_of_each_run_the_losses_decide(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made("s/a", 0.1, {40: 2.0})
    (made("s/b", 0.2, {40: 1.0}) / "metrics.jsonl").write_text('{"step": 40, "time": 1.0, "val/loss": 1.5}\n')
    assert compare(capsys, "--compare", "s")[1].splitlines()[:2] == [
        "1. b: val/loss 1.5000 after step 40",
        "2. a: val/loss 2.0000 after step 40",
    ]


def test_damaged_runs_are_named_and_the_others_ranked(sweep, capsys):
    Path("sweep/r3/config.yaml").write_text("trainer: [")
    rows = Path("sweep/r4/metrics.jsonl")
    rows.write_text(rows.read_text() + '{"step": 41, "ti')
    code, out, _, page = compare(capsys, "--compare", "sweep")
    said = [
        "r3 is left out: sweep/r3/config.yaml is not valid YAML",
        "r4: metrics.jsonl ends within line 3: that row is left out.",
    ]
    assert code == 0 and all(each in page for each in said) and out.count("note: ") == 3
    assert "r3:" not in out.partition("note:")[0] and "9. r0" in out


def test_many_settings_that_differ_are_in_a_table_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(2):
        path = made(f"s/r{i}", 0.1, {40: 1.0 + i})
        more = ", ".join(f"s{j}: {i + j}" for j in range(20))
        (path / "config.yaml").write_text((path / "config.yaml").read_text() + f"loss: {{{more}}}\n")
    page = compare(capsys, "--compare", "s")[3]
    assert len(cells(section(page, "Ranking"))[0]) == 4 + 12 + 4
    assert "all settings that differ: 20" in section(page, "Settings")
    assert len(cells(section(page, "Settings"))) == 1 + 20


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["--compare", "none"], ["none", "(--compare)"]),
        (["--compare", "sweep/notes"], ["sweep/notes", "config.yaml", "metrics.jsonl", "metrics.csv", "(--compare)"]),
        (["--compare", "."], ["sweep is no run, but has 1 run in it (--compare sweep)"]),
        (["--compare", ""], ["compare", "(--compare)"]),
        (["--compare", "sweep", "--run", "sweep/r1"], ["--run", "--compare"]),
        (["--compare", "sweep", "--check_against", "x.csv"], ["check_against", "(--run)"]),
        (["--compare", "sweep", "--check_tolerance", "0.1"], ["(--run)"]),
    ],
)
def test_a_mistake_in_a_comparison_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, keys):
    monkeypatch.chdir(tmp_path)
    made("sweep/r1", 0.1, {40: 1.0})
    Path("sweep/notes").mkdir()
    code, out, err, _ = compare(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and not Path("page.html").exists()
    assert err.startswith("error: ") and all(key in err for key in keys)


def test_folders_that_are_left_out_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("runs/a", "runs/wd0", "runs/wd0.1", "runs/sweep/r1", "runs/sweep/r2")):
        made(name, 0.1, {40: 1.0 + i})
    old = made("runs/a.1", 0.1, {40: 0.5})
    (old / "config.yaml").write_text((old / "config.yaml").read_text().replace("runs/a.1", "runs/a"))  # as fit renames it
    out = compare(capsys, "--compare", "runs")[1].splitlines()
    assert sorted(line.split()[1] for line in out[:3]) == ["a:", "wd0.1:", "wd0:"]
    assert out[3:-1] == [
        "note: sweep is no run, but has 2 runs in it (--compare runs/sweep).",
        "note: a.1 is left out: a later run with --replace took its place (--compare runs/a.1 ranks it).",
    ]
    assert compare(capsys, "--compare", "runs/a.1", "runs/a")[1].startswith("1. a.1: val/bits_per_byte 0.2500")


def test_settings_that_differ_after_the_fourth_digit_are_a_column(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i, decay in enumerate((0.99995, 0.99999, 0.3)):
        path = made(f"s/r{i}", 0.1, {40: 1.0 + i})
        (path / "config.yaml").write_text((path / "config.yaml").read_text() + f"loss: {{z_loss: {decay}}}\n")
    page = compare(capsys, "--compare", "s")[3]
    head, *rows = cells(section(page, "Ranking"))
    assert [row[head.index("loss.z_loss")] for row in rows] == ["0.99995", "0.99999", "0.3"]
    assert "<title>r0: 0.5 at 0.99995</title>" in section(page, "Final loss by setting")


def test_classes_of_one_name_are_told_apart_and_what_makes_another_curve_is_a_column(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i, module in enumerate(("mine", "torch.optim")):
        path = made(f"s/r{i}", 0.1, {40: 1.0 + i})
        text = (path / "config.yaml").read_text().replace("torch.optim.AdamW", f"{module}.AdamW")
        text = text.replace("max_steps: 40", f"max_steps: 40, log_every_n_steps: {i + 1}")
        (path / "config.yaml").write_text(text + f"use_ema: {str(bool(i)).lower()}\n")
    head, *rows = cells(section(compare(capsys, "--compare", "s")[3], "Ranking"))
    assert [dict(zip(head[4:-4], row[4:-4], strict=True)) for row in rows] == [
        {"optimizer": "mine.AdamW", "use_ema": "false"},
        {"optimizer": "torch.optim.AdamW", "use_ema": "true"},
    ]


def test_a_run_diverges_where_its_last_losses_are_not_finite_and_its_value_is_that_of_its_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made("s/nan", 0.1, {1: 5.0, 3: "NaN", 10: 4.0, 20: "NaN", 30: "NaN"})
    path = made("s/late", 0.1, {10: 4.0, 30: 3.0}) / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 40, "time": 40.0, "train/loss": 2.0}\n')
    out = compare(capsys, "--compare", "s")[1].splitlines()
    assert out[0] == "1. late: val/bits_per_byte 1.5000 after step 30"
    assert out[2] == "note: nan diverged: its training loss is nan, and not finite from step 20 on."


def test_a_sweep_of_which_no_run_reached_its_last_step_has_its_chart_and_one_run_is_no_plural(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        made(f"s/r{i}", 0.1 * (i + 1), {20 + i: 1.0 + i})
    made("s/empty", 0.9, {})
    page = compare(capsys, "--compare", "s")[3]
    drawn = section(page, "Final loss by setting")
    assert "No run is known to have come to its end. Each point is a run with a finite loss, where it stopped." in drawn
    assert drawn.count("<circle") == 3 and "<h2>Curves of 3 settings</h2>" in page
    assert "<h1>Comparison of 1 run</h1>" in compare(capsys, "--compare", "s/r0")[3]


def test_runs_that_ended_as_their_settings_ask_are_complete(tmp_path, monkeypatch, capsys):
    """Early stopping and a limit of time are such ends, a signal is none; a launch without an end runs or died.

    The end of a launch says nothing about the run if later steps were logged, by a launch that plan.json does not have.
    """
    monkeypatch.chdir(tmp_path)
    ends = {
        "early": ("early stopping: val/loss is 3, best 2, patience 1", True),
        "timed": ("reached trainer.max_time", True),
        "signal": ("stopped by SIGTERM", False),
        "guard": ("stopped by the spike guard: 5 skipped", False),
        "died": (None, False),
        "went on": ("reached trainer.max_time", True),
    }
    for i, (name, (why, complete)) in enumerate(ends.items()):
        path = made(f"s/{name}", 0.1 * (i + 1), {1: 9.0, 20: 5.0 - i})
        older = {**LAUNCH, "ended": "reached trainer.max_steps=20", "complete": True}
        last_step = 19 if name == "went on" else 20
        launches = [older, {**LAUNCH, "ended": why, "complete": complete, "last_step": last_step}]
        (path / "plan.json").write_text(json.dumps({"format": 1, "launches": launches}))
    _, out, _, page = compare(capsys, "--compare", "s")
    places = [line.split(":")[0] for line in out.splitlines()[:6]]
    assert places == ["1. timed", "2. early", "3. went on", "4. died", "5. guard", "6. signal"]
    lead, end, died, more = out.splitlines()[6:10]
    assert "is ahead of early" in lead and "lowest or highest value tried" in end and more == "3 more notes in the page."
    assert died == "note: went on has 20 of 40 steps: it runs, was stopped, or died."
    for said in (
        "died has 20 of 40 steps: it runs, was stopped, or died.",
        "guard has 20 of 40 steps: stopped by the spike guard: 5 skipped.",
        "signal has 20 of 40 steps: stopped by SIGTERM.",
    ):
        assert f"<p>{said}</p>" in page
    drawn = section(page, "Final loss by setting")
    assert "Each point is a run that came to its end with a finite loss." in drawn and drawn.count("<circle") == 2
    lock = {"pid": 1, "host": "node17", "machine": "another", "started": "1", "since": "today", "token": "its"}
    Path("s/died/lock.json").write_text(json.dumps(lock))
    page = compare(capsys, "--compare", "s/early", "s/died")[3]
    assert "died has 20 of 40 steps: process 1 on node17 (since today) updated lock.json " in page
    drawn = section(page, "Final loss by setting")
    assert "Only one run is known to have come to its end. Each point is a run with" in drawn and drawn.count("<circle") == 2
    assert run(capsys, "report", "--run", "s/early", "--out", "one.html")[0] == 0
    one = Path("one.html").read_text()
    assert "early stopping: val/loss is 3, best 2, patience 1" in one and "steps<b>20</b>" in one, "not 20 of 40"


def test_the_csv_of_several_runs_has_sizes_flops_losses_and_settings_that_differ(tmp_path, monkeypatch, capsys):
    """FLOPs: those of a token times the tokens read. A run without plan.json has empty cells for size and FLOPs."""
    monkeypatch.chdir(tmp_path)
    for name, parameters, lr in (("small", 1000, 0.1), ("large", 4000, 0.2), ("bare", None, 0.2)):
        path = made(f"s/{name}", lr, {1: 9.0, 20 if name == "bare" else 40: 4.0}, **{"progress/tokens": 512.0})
        launch = {**LAUNCH, "parameters": parameters, "flops_per_token": 6.0 * (parameters or 0)}
        if parameters is not None:
            (path / "plan.json").write_text(json.dumps({"format": 1, "launches": [launch]}))
    code, out, _ = run(capsys, "report", "--compare", "s", "--csv", "runs.csv")
    assert code == 0 and out.splitlines()[-1] == "Wrote 3 runs to runs.csv." and "in the page" not in out
    with open("runs.csv") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert {name: row["parameters"] for name, row in rows.items()} == {"small": "1000", "large": "4000", "bare": ""}
    assert float(rows["large"]["flops"]) == 6 * 4000 * 512 and rows["bare"]["flops"] == ""
    assert [rows[name]["complete"] for name in ("small", "large", "bare")] == ["True", "True", "False"]
    assert float(rows["small"]["val/loss"]) == 4 and float(rows["small"]["val/bits_per_byte"]) == 2
    assert [rows[name]["optimizer.lr"] for name in ("small", "large")] == ["0.1", "0.2"]
    assert "model.n_layer" not in rows["small"]  # all have the same
    code, _, err = run(capsys, "report", "--compare", "s", "--csv", "more.csv", "--note", "a=b")
    assert code == 2 and err.startswith("error: note is for the CSV of one run") and not Path("more.csv").exists()


def test_learning_rates_that_differ_by_more_than_ten_have_a_logarithmic_axis(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        path = made(f"s/r{i}", 10.0**-i, {40: 1.0}) / "metrics.jsonl"
        path.write_text(
            "".join(json.dumps({"step": n, "time": 1.0, "val/loss": 1.0 + i, "lr": 10.0**-i}) + "\n" for n in (1, 2))
        )
    drawn = section(compare(capsys, "--compare", "s")[3], "Learning rate")
    heights = [float(path.split()[1].partition("L")[0]) for path in re.findall(r'd="M([^"]*)"', drawn)]
    assert sorted(heights) == pytest.approx([0, 500, 1000], abs=0.5) and "logarithmic" in drawn
    assert "logarithmic" not in section(compare(capsys, "--compare", "s/r0", "s/r1")[3], "Learning rate"), "a factor of ten"


def test_a_run_that_diverges_to_finite_values_leaves_the_others_visible(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        made(f"s/r{i}", 0.1 * (i + 1), {1: 5.0, 20: 3.0, 40: 2.0 + i / 10})
    made("s/wild", 30.0, {1: 5.0, 20: 4e6, 40: 3e6})
    drawn = section(compare(capsys, "--compare", "s")[3], "Loss")
    assert "Values above 10.06 are cut off" in drawn, "twice the first training loss"


def test_a_run_that_ended_early_is_no_point_over_its_planned_length(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for steps in (20, 30, 40, 400):
        path = made(f"s/r{steps}", 0.1, {1: 5.0, min(steps, 101): 3.0 - steps / 100})
        config = path / "config.yaml"
        config.write_text(config.read_text().replace("max_steps: 40", f"max_steps: {steps}"))
    launch = {**LAUNCH, "ended": "reached trainer.max_time", "complete": True, "last_step": 101}
    Path("s/r400/plan.json").write_text(json.dumps({"format": 1, "launches": [launch]}))
    drawn = section(compare(capsys, "--compare", "s")[3], "Final loss by setting")
    assert "trainer.max_steps" in drawn and "r40:" in drawn and "r400:" not in drawn

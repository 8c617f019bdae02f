"""`report` of real runs, and of folders that are none."""

import json
import re
import shutil
from pathlib import Path

import pytest
from launches import LAUNCH
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from recipe_runs import breaking, curve, run

from lit_llm.reporting.run_curves import RunCurves
from lit_llm.runs import load

TINY = ("--config", "tiny.yaml", "--samples", "TextSamples", "--samples.prompts", '["line"]', "--samples.every_n_steps", "4")


def section(page: str, title: str) -> str:
    return page.split(f"<h2>{title}</h2>")[1].split("<h2>")[0]


def report(capsys, *arguments: str) -> tuple[int, str, str, str]:
    code, out, err = run(capsys, "report", *arguments, "--out", "report.html", "--replace", "true")
    return code, out, err, Path("report.html").read_text() if code == 0 else ""


@pytest.fixture
def trained(folder, capsys):
    """runs/tiny, interrupted in step 6 after its save in step 3, and continued."""
    with pytest.raises(KeyError):
        run(capsys, "fit", *TINY, *breaking(6))
    assert run(capsys, "fit", *TINY, "--resume", "auto")[0] == 0
    return Path("runs/tiny")


def test_a_run_that_was_interrupted_is_one_curve_and_the_page_is_one_file(trained, capsys):
    code, out, _, page = report(capsys, "--run", str(trained))
    assert (code, out) == (0, "Wrote report.html. Open it in a browser.\n")
    losses, validation = curve(trained, "train/loss"), curve(trained, "val/loss")
    assert sorted(losses) == list(range(1, 9))
    assert f"training loss<b>{losses[8]:.4f}</b>" in page and f"validation loss<b>{validation[8]:.4f}</b>" in page
    assert "steps<b>8 of 8</b>" in page and "tokens<b>512</b>" in page  # 8 steps of 4 rows of 16
    over_steps = section(page, "Loss").split("<section>")[1]
    training, validated = re.findall(r'<path class="curve[^"]*" d="M([^"]*)"', over_steps)
    assert training.count("L") == 7 and validated.count("L") == 1
    assert not re.search(r"(src|href)=|<script|<link|@import|url\(", page)
    texts = load(trained).texts["samples/line"]
    assert [step for step, _ in texts] == [4, 8] and all(f"samples/line, step {step}" in page for step, _ in texts)
    launches = json.loads((trained / "plan.json").read_text())["launches"]
    assert section(page, "Planned and measured").count("<tr>") == 1 + len(launches)


def test_loaded_curves_are_a_table_of_what_was_logged(trained):
    pandas = pytest.importorskip("pandas")
    loaded = load(trained)
    for tag in ("train/loss", "val/loss", "lr"):
        expected = pandas.Series(curve(trained, tag), dtype="float64")
        pandas.testing.assert_series_equal(loaded.frame[tag].dropna(), expected, check_names=False)
    assert [path.name for path in loaded.checkpoints] == ["step-00000006.ckpt", "step-00000008.ckpt"]
    assert loaded.config["trainer"]["max_steps"] == 8


def test_time_leaves_out_the_pause_between_two_launches(tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {}\n")
    write(tmp_path, {1: (100.0, 3.0), 2: (110.0, 2.0)}, 0)
    write(tmp_path, {3: (1040.0, 1.5), 4: (1050.0, 1.0)}, 3)
    # 1,030 s: 920 s after the last row before it. The launch at 500 s logged nothing.
    launches = [{**LAUNCH, "started": f"1970-01-01T00:{at}+00:00"} for at in ("08:20", "17:10")]
    (tmp_path / "plan.json").write_text(json.dumps({"format": 1, "launches": launches}))
    found = RunCurves(load(tmp_path), "a")
    assert found.over_time("train/loss") == [(0.0, 3.0), (10.0, 2.0), (20.0, 1.5), (30.0, 1.0)]
    assert found.seconds == 30.0
    (tmp_path / "plan.json").unlink()
    assert RunCurves(load(tmp_path), "a").seconds == 950.0


def test_a_run_of_another_project_has_a_page(folder, capsys):
    made("theirs", {}, config="trainer: null\n")
    logger = TensorBoardLogger("theirs", name="", version="")
    logger.experiment.add_scalar("train_loss", 2.0, 1)
    logger.finalize("success")
    code, out, _, _ = report(capsys, "--run", "theirs")
    assert code == 0 and "note: theirs has neither train/loss nor val/loss. It logged train_loss." in out
    (Path("theirs") / "config.yaml").unlink()
    code, _, _, page = report(capsys, "--run", "theirs")  # the events alone
    assert code == 0 and "<title>logged: 2 at 1</title>" in section(page, "train_loss"), "what no chart knows is drawn, too"


def test_a_folder_of_a_csv_logger_has_a_page_and_is_ranked(folder, capsys):
    for name, loss in (("a", 2.5), ("b", 1.5)):
        logger = CSVLogger("logs", name=name, version="")
        for step in (0, 9):
            logger.log_metrics({"train/loss": loss + 9 - step}, step)
        logger.save()
    code, _, _, page = report(capsys, "--run", "logs/a")
    over_steps, *others = re.findall(r'd="M([^"]*)"', section(page, "Loss"))
    assert code == 0 and "training loss<b>2.5000</b>" in page and over_steps.count("L") == 1 and not others, (
        "no times, no tokens"
    )
    code, out, _, _ = report(capsys, "--compare", "logs")
    assert code == 0 and out.splitlines()[:2] == [
        "1. b: train/loss 1.5000 after step 9",
        "2. a: train/loss 2.5000 after step 9",
    ]


def test_of_a_step_that_was_logged_twice_the_later_values_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made("run", {})
    for part, rows in enumerate(({1: 5.0, 2: 4.0, 3: 3.0}, {2: 2.0, 3: 1.0})):  # without a purge step, as in plain Lightning
        logger = TensorBoardLogger("run", name="", version="")
        for step, value in rows.items():
            logger.experiment.add_scalar("train/loss", value, step, walltime=10.0 * part + step)
            logger.experiment.add_scalar("val/loss", value, step, walltime=10.0 * part + step)
        logger.finalize("success")
        (file,) = [path for path in Path("run").glob("events.*") if "part" not in path.name]
        file.rename(f"run/events.out.tfevents.part-{part}")
    loaded = load("run")
    assert RunCurves(loaded, "a").over_steps("train/loss") == [(1, 5.0), (2, 2.0), (3, 1.0)]
    pytest.importorskip("pandas")
    assert loaded.frame["val/loss"].to_dict() == {1: 5.0, 2: 2.0, 3: 1.0}


def test_what_cannot_be_read_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made("run", {step: (float(step), 1.0 / step) for step in range(1, 9)})
    (events,) = Path("run").glob("events.*")
    content = bytearray(events.read_bytes())
    at = content.find(b"train/loss", content.find(b"train/loss") + 200)  # within a record in the middle
    content[at] ^= 0xFF
    events.write_bytes(content)
    said = report(capsys, "--run", "run")[1]
    read = int(re.search(r"cannot be read after byte ([\d,]+) of", said)[1].replace(",", ""))
    assert 0 < read < at < len(content) and f"of {len(content):,}: the rows behind it are missing." in said


def test_the_ranking_uses_one_loss_and_leaves_out_runs_without_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made("words", {1: (1.0, 3.0)}, **{"val/bits_per_byte": 1.5, "memory/peak_gb": 10.0})
    made("bytes", {1: (1.0, 1.0)}, **{"val/bits_per_byte": 1.6})
    made("young", {1: (1.0, 0.5)})
    out = report(capsys, "--run", "young", "--run", "bytes", "--run", "words")[1].splitlines()
    assert out[:3] == [
        "1. words: val/bits_per_byte 1.5000 after step 1",
        "2. bytes: val/bits_per_byte 1.6000 after step 1",
        "–. young: no finite val/bits_per_byte after step 1",
    ]
    made("empty", {})
    made("other", {})
    out = report(capsys, "--run", "empty", "--run", "other")
    assert out[1].startswith("–. empty: no finite loss") and "No run has logged a loss." in out[3]


def made(name: str, rows: dict[int, tuple[float, float]], *, config: str = "trainer: {}\n", **last: float) -> None:
    """A run folder with train/loss: step → (time, loss), and further tags at the last step."""
    Path(name).mkdir()
    Path(name, "config.yaml").write_text(config)
    if rows:
        write(Path(name), rows, 0, **last)


def write(folder: Path, rows: dict[int, tuple[float, float]], purge_step: int, **last: float) -> None:
    """An event file with train/loss: step → (time, loss), and further tags at the last step."""
    logger = TensorBoardLogger(folder, name="", version="", purge_step=purge_step)
    for step, (time, loss) in rows.items():
        logger.experiment.add_scalar("train/loss", loss, step, walltime=time)
    for tag, value in last.items():
        logger.experiment.add_scalar(tag, value, max(rows), walltime=max(time for time, _ in rows.values()))
    logger.finalize("success")
    (file,) = [path for path in folder.glob("events.*") if "part" not in path.name]
    file.rename(folder / f"events.out.tfevents.part-{purge_step}")


def test_tokens_of_a_validation_are_those_of_the_last_row(trained):
    found = RunCurves(load(trained), "a")
    assert found.over_tokens("val/loss") == [
        (4 * 64.0, pytest.approx(curve(trained, "val/loss")[4], rel=1e-6)),
        (8 * 64.0, pytest.approx(curve(trained, "val/loss")[8], rel=1e-6)),
    ]


@pytest.mark.slow
def test_several_runs_are_ranked_and_their_settings_compared(trained, folder, capsys):
    worse = "--optimizer.lr=0.00001"
    assert run(capsys, "fit", *TINY, worse, "--optimizer.adamw_lr", "0.00001", "--run_dir", "runs/slow")[0] == 0
    _, out, _, page = report(capsys, "--run", "runs/slow", "--run", "runs/tiny")
    best, other = (curve(Path("runs", name), "val/bits_per_byte")[8] for name in ("tiny", "slow"))
    assert best < other
    assert out.splitlines()[:2] == [
        f"1. tiny: val/bits_per_byte {best:.4f} after step 8",
        f"2. slow: val/bits_per_byte {other:.4f} after step 8",
    ]
    rows = re.findall(r"<tr>(.*?)</tr>", section(page, "Ranking"))
    head, *others = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    assert [row[head.index("optimizer.lr")] for row in others] == ["0.01", "1e-05"]
    assert "model.n_layer" not in head, "equal settings are not listed"
    assert [row[:2] for row in others] == [["1", "tiny"], ["2", "slow"]]
    assert "samples/line, step 8" in section(page, "Samples: tiny") and "samples/line" in section(page, "Samples: slow")


def test_the_deviation_from_a_recorded_curve(trained, folder, capsys):
    run(capsys, "report", "--run", str(trained), "--csv", "same.csv")
    lines = Path("same.csv").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("5,"))
    cells = lines[at].split(",")
    Path("other.csv").write_text("\n".join([*lines[:at], ",".join([*cells[:2], "1.0", *cells[3:]]), *lines[at + 1 :]]))
    said = section(report(capsys, "--run", str(trained), "--check_against", "same.csv")[3], "Against the recorded curve")
    assert "this run follows same.csv: 8 rows of 8" in said
    plan = json.loads((trained / "plan.json").read_text())
    plan["launches"][-1]["versions"] = {"torch": "1.0"}
    (trained / "plan.json").write_text(json.dumps(plan))
    said = section(report(capsys, "--run", str(trained), "--check_against", "other.csv")[3], "Against the recorded curve")
    assert "leaves other.csv at step 5: loss" in said and "this run with torch 1.0" in said


def test_a_folder_without_rows_gives_a_page_that_says_so(folder, capsys):
    Path("runs/empty").mkdir(parents=True)
    Path("runs/empty/config.yaml").write_text("trainer: {max_steps: 8}\n")
    code, out, _, page = report(capsys, "--run", "runs/empty")
    said = "empty has logged nothing: it has not reached its first row, or ran without a logger (trainer.logger=false)."
    assert code == 0 and f"note: {said}" in out and said in page and "No loss was logged." in page


def test_damaged_files_of_a_run_leave_the_rest(trained, capsys):
    events = max(trained.glob("events.*"), key=lambda path: path.stat().st_mtime)
    events.write_bytes(events.read_bytes()[:-7])
    (trained / "plan.json").write_text('{"format": 1, "launches": [{"sta')
    shutil.rmtree(trained / "checkpoints")
    code, out, _, page = report(capsys, "--run", str(trained))
    assert code == 0 and "Not recorded." in page
    assert (
        "tiny has no plan.json that can be read" in out
        and "cannot be read after byte" in out
        and "tiny has no checkpoint." in out
        and "training loss<b>" in page
    )


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["--run", "runs/none"], ["runs/none", "config.yaml", "metrics.jsonl", "metrics.csv", "(--run)"]),
        (["--run", "."], [". is", "(--run)"]),
        (["--run", "runs"], ["1 run in it (--compare runs)"]),
        (["--run", ""], ["run", "(--run)"]),
        (["--run", "runs/tiny", "--check_against", "none.csv"], ["none.csv", "(--check_against)"]),
        (["--run", "runs/tiny", "--check_tolerance", "1"], ["check_tolerance", "(--check_against)"]),
        (["--run", "runs/tiny", "--check_against", "none.csv", "--check_tolerance", "0"], ["0.0", "(--check_tolerance)"]),
        ([], ["--run", "--compare"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(folder, capsys, arguments, keys):
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/config.yaml").write_text("trainer: {}\n")
    code, out, err, _ = report(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and not Path("report.html").exists()
    assert err.startswith("error: ") and all(key in err for key in keys)

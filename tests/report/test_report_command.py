"""`report` of real runs, and of folders that are none."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from recipe_runs import breaking, curve, run

from lit_llm.report.run_curves import RunCurves, named
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
    texts = load(trained).texts["samples/0"]
    assert [step for step, _ in texts] == [4, 8] and all(f"samples/0, step {step}" in page for step, _ in texts)
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
    started = "1970-01-01T00:17:10+00:00"  # 1,030 s: 920 s after the last row before it
    launch = {"started": started, "measured": {}, "versions": {}, "machine": {}, "hardware": {"name": "cpu"}}
    (tmp_path / "plan.json").write_text(json.dumps({"format": 1, "launches": [launch]}))
    found = RunCurves(load(tmp_path), "a")
    assert found.over_time("train/loss") == [(0.0, 3.0), (10.0, 2.0), (20.0, 1.5), (30.0, 1.0)]
    assert found.seconds == 30.0
    (tmp_path / "plan.json").unlink()
    assert RunCurves(load(tmp_path), "a").seconds == 950.0


def write(folder: Path, rows: dict[int, tuple[float, float]], purge_step: int) -> None:
    """An event file with train/loss: step → (time, loss)."""
    logger = TensorBoardLogger(folder, name="", version="", purge_step=purge_step)
    for step, (time, loss) in rows.items():
        logger.experiment.add_scalar("train/loss", loss, step, walltime=time)
    logger.finalize("success")
    (file,) = [path for path in folder.glob("events.*") if "part" not in path.name]
    file.rename(folder / f"events.out.tfevents.part-{purge_step}")


def test_tokens_of_a_validation_are_those_of_the_last_row(trained):
    found = RunCurves(load(trained), "a")
    assert found.over_tokens("val/loss") == [
        (4 * 64.0, curve(trained, "val/loss")[4]),
        (8 * 64.0, curve(trained, "val/loss")[8]),
    ]


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
    table = section(page, "Settings")
    assert "<td>optimizer.init_args.lr</td><td>1e-05</td><td>0.01</td>" in table
    assert "model.n_layer" not in table, "equal settings are not listed"
    assert page.index("<td>1</td><td>tiny</td>") < page.index("<td>2</td><td>slow</td>")


def test_a_run_without_a_finite_loss_is_last(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, loss in (("broken", math.nan), ("fine", 9.0)):
        Path(name).mkdir()
        (Path(name) / "config.yaml").write_text("trainer: {}\n")
        write(Path(name), {1: (1.0, 3.0), 2: (2.0, loss)}, 0)
    _, out, _, page = report(capsys, "--run", "broken", "--run", "fine")
    assert out.splitlines()[:2] == ["1. fine: train/loss 9.0000 after step 2", "2. broken: no finite train/loss after step 2"]
    assert "1 value is not finite and not drawn" in section(page, "Loss")


def test_the_deviation_from_a_recorded_curve(trained, folder, capsys):
    run(capsys, "curve", "--run", str(trained), "--out", "same.csv")
    lines = Path("same.csv").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("5,"))
    cells = lines[at].split(",")
    Path("other.csv").write_text("\n".join([*lines[:at], ",".join([*cells[:2], "1.0", *cells[3:]]), *lines[at + 1 :]]))
    said = section(report(capsys, "--run", str(trained), "--check_against", "same.csv")[3], "Against the recorded curve")
    assert "this run follows same.csv: 8 rows of 8" in said
    said = section(report(capsys, "--run", str(trained), "--check_against", "other.csv")[3], "Against the recorded curve")
    assert "leaves other.csv at step 5: loss" in said


def test_a_folder_without_rows_gives_a_page_that_says_so(folder, capsys):
    Path("runs/empty").mkdir(parents=True)
    Path("runs/empty/config.yaml").write_text("trainer: {max_steps: 8}\n")
    code, out, _, page = report(capsys, "--run", "runs/empty")
    said = "empty has logged nothing: it has not reached its first row, or ran without a TensorBoard logger."
    assert code == 0 and f"note: {said}" in out and said in page and "No loss was logged." in page


def test_damaged_files_of_a_run_leave_the_rest(trained, capsys):
    events = max(trained.glob("events.*"), key=lambda path: path.stat().st_mtime)
    events.write_bytes(events.read_bytes()[:-7])
    (trained / "plan.json").write_text('{"format": 1, "launches": [{"sta')
    shutil.rmtree(trained / "checkpoints")
    code, out, _, page = report(capsys, "--run", str(trained))
    assert code == 0 and "Not recorded." in page
    assert "tiny has no plan.json" in out and "tiny has no checkpoint." in out and "training loss<b>" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "runs/none"], "runs/none is not a run folder: it has no config.yaml (--run)"),
        (["--run", "."], ". is not a run folder: it has no config.yaml (--run)"),
        (["--run", ""], "run is empty, but must name a folder (--run)"),
        (["--run", "runs/tiny", "--run", "runs/tiny/"], "a run folder is given twice (--run)"),
        (["--run", "runs/tiny", "--check_against", "none.csv"], "curve none.csv cannot be read: No such file or directory"),
        (["--run", "runs/tiny", "--check_tolerance", "0"], "check_tolerance is 0.0, it must be above 0 (--check_tolerance)"),
        ([f"--run=runs/{i}" for i in range(10)], "10 runs are given, but a page has colours for 9 (--run)"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(folder, capsys, arguments, said):
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/config.yaml").write_text("trainer: {}\n")
    code, out, err, _ = report(capsys, *arguments)
    assert (code, out, err) == (2, "", f"error: {said}\n")
    assert not Path("report.html").exists()


def test_names_are_folders_or_whole_paths_where_two_are_equal():
    assert named([Path("runs/a"), Path("runs/b/")]) == ["a", "b"]
    assert named([Path("runs/a"), Path("old/a"), Path("b")]) == ["runs/a", "old/a", "b"]

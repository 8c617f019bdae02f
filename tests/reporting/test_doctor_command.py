"""`doctor` of real runs, damaged ones and folders that are none; and what `fit` prints of it."""

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from recipe_runs import RECIPE, TEXT, run

from lit_llm.__main__ import main
from lit_llm.reporting.doctor.diagnose import damages, data_shards
from lit_llm.runs.lock import LOCK, _machine
from lit_llm.runs.run_folder import METRICS

MANY = [
    *("--trainer.max_steps", "100", "--schedule.warmup_steps", "0"),
    *("--checkpoint.every_n_steps", "1000", "--validation.every_n_steps", "1000"),
]


def doctor(capsys, folder: Path | str, *flags: str) -> tuple[int, list[str]]:
    code, out, err = run(capsys, "doctor", "--run", str(folder), *flags)
    return code, (out + err).splitlines()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run whose rate is highest at its first step, and what `fit` printed."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "text.txt").write_text(TEXT)
    (folder / "tiny.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        assert main(["fit", "--config", "tiny.yaml", *MANY]) == 0
    return folder / "runs" / "tiny", out.getvalue()


@pytest.fixture
def trained(finished, tmp_path):
    """A copy of it."""
    shutil.copytree(finished[0], tmp_path / "copy")
    return tmp_path / "copy", finished[1]


def test_a_finding_has_what_was_seen_and_what_to_change(trained, capsys):
    code, lines = doctor(capsys, trained[0])
    at = lines.index("advice: no-warmup")
    assert code == 0  # advice only
    assert lines[at + 1].startswith("  seen    the learning rate starts at ") and "--schedule.warmup_steps 100" in lines[at + 3]


def test_fit_prints_a_finding_once(trained):
    assert sum(line.startswith("doctor: no-warmup: ") for line in trained[1].splitlines()) == 1


@pytest.mark.slow
def test_fit_without_doctor_prints_none(folder, capsys):
    _, out, _ = run(capsys, "fit", "--config", "tiny.yaml", *MANY, "--doctor", "null")
    assert "doctor:" not in out


def test_a_run_cut_in_the_middle_of_a_line_is_read_up_to_there(trained, capsys):
    file = trained[0] / METRICS
    file.write_bytes(file.read_bytes()[:-20])
    code, lines = doctor(capsys, trained[0])
    assert code == 0 and "advice: no-warmup" in lines and any(line.startswith("note: metrics.jsonl") for line in lines)


def test_a_run_whose_process_was_killed_says_so(trained, capsys):
    """The lock names a process that started at another time than the one that has its number now."""
    folder = trained[0]
    assert not any("note: process" in line for line in doctor(capsys, folder)[1])
    lock = {"pid": os.getpid(), "host": "here", "machine": _machine(), "started": "1", "since": "today", "token": "its"}
    (folder / LOCK).write_text(json.dumps(lock))
    code, lines = doctor(capsys, folder)
    said = next(line for line in lines if "note: process" in line)
    killed = f"process {os.getpid()} on here (since today) was killed: python -m lit_llm fit --run {folder} --resume auto"
    assert code == 0 and re.fullmatch(rf"note: {re.escape(killed)} continues\. The newest row is \d+ s old\.", said)


def test_a_run_that_ended_with_an_error_says_so(trained, capsys):
    plan = json.loads((trained[0] / "plan.json").read_text())
    plan["launches"][-1]["ended"] = None
    (trained[0] / "plan.json").write_text(json.dumps(plan))
    assert any("recorded no end: an error" in line for line in doctor(capsys, trained[0])[1])


def test_a_run_without_a_row_says_so(trained, capsys):
    for file in [trained[0] / METRICS, *trained[0].glob("*tfevents*")]:
        file.unlink()
    code, lines = doctor(capsys, trained[0])
    assert code == 2 and any(line.startswith("note: Nothing was logged") for line in lines)


def test_a_run_can_be_sent_without_its_text_and_paths(trained, capsys):
    case = trained[0].parent / "case.json"
    found = doctor(capsys, trained[0], "--report", str(case))
    content = case.read_text()
    assert str(trained[0].parent) not in content and "text.txt" not in content and TEXT[:20] not in content
    again = doctor(capsys, case)
    assert again[0] == found[0] and [line for line in again[1] if ": " in line[:9]] == [
        line for line in found[1] if line.startswith(("error", "warning", "advice"))
    ]
    assert doctor(capsys, trained[0], "--report", str(case))[0] == 2  # it exists
    case.write_text("old")
    assert doctor(capsys, trained[0], "--report", str(case), "--replace", "true")[0] == found[0]
    assert case.read_text() == content
    endless = '{"rows": {"lr": [[Infinity], [1]]}, "config": {}, "first_steps": []}'
    for damaged in ("[]", "[" * 100_000, endless):
        case.write_text(damaged)
        code, lines = doctor(capsys, case)
        assert code == 2 and lines[-1].endswith("(--run)"), damaged[:20]


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_folder_that_is_no_run_is_refused(folder, capsys, name):
    Path("empty").mkdir()
    code, lines = doctor(capsys, name)
    assert code == 2 and name in lines[-1] and "--run" in lines[-1]


def test_the_folder_of_another_project_is_read(folder, capsys):
    logger = TensorBoardLogger("theirs", name="", version="")
    for step in range(1, 101):
        logger.log_metrics({"train/loss": 5.0 - step / 30 if step < 60 else float("nan")}, step)
    logger.finalize("success")
    code, lines = doctor(capsys, "theirs")
    assert code == 1 and "error: loss-not-finite" in lines and any("There is no config.yaml" in line for line in lines)


def test_what_csv_logger_writes_is_read(folder, capsys):
    for tag, code, said in (
        ("train/loss", 1, "error: loss-not-finite"),
        ("my_loss", 2, "note: No rule reads any of the 1 curves"),
    ):
        logger = CSVLogger("csv", name="", version=tag.replace("/", "-"))
        for step in range(1, 101):
            logger.log_metrics({tag: 5.0 - step / 30 if step < 60 else float("nan")}, step)
        logger.save()
        found, lines = doctor(capsys, logger.log_dir)
        assert found == code and any(line.startswith(said) for line in lines)


def test_a_shard_whose_bytes_changed_is_named(folder, capsys, monkeypatch):
    assert (
        run(capsys, "prepare", "--data", "TextFiles", "--data.paths", "text.txt", "--data.tokenizer", "Bytes", "--out", "s")[0]
        == 0
    )
    flags = ["--data", "TokenShards", "--data.path", "s"]
    assert run(capsys, "fit", "--config", "tiny.yaml", *flags)[0] == 0
    assert not any("data-damaged" in line for line in doctor(capsys, "runs/tiny")[1])
    shard = next(Path("s").glob("train*.bin"))
    content = bytearray(shard.read_bytes())
    content[1100] ^= 1
    shard.write_bytes(content)
    code, lines = doctor(capsys, "runs/tiny")
    assert code == 1 and "error: data-damaged" in lines and any(str(shard) in line for line in lines)
    assert not any("data-damaged" in line for line in doctor(capsys, "runs/tiny", "--check_data", "false")[1])
    monkeypatch.setenv("HOME", str(folder))
    settings = [{"path": "~/s"}, {"sources": {"web": {"path": "s"}}}, {"path": "s", "prompt": "x" * 300, "of": "~nobody/s"}]
    for each in settings:  # of TokenShards, of a mixture, of a user's data module
        assert len(damages(data_shards({"data": {"init_args": each}}))) == 1
    shutil.rmtree("s")
    assert not any("data-damaged" in line for line in doctor(capsys, "runs/tiny")[1])

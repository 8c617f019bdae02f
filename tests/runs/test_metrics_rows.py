"""Curves are read from metrics.jsonl, whatever logger a run used and however the file is damaged."""

import json
import math
from pathlib import Path

import pytest
from recipe_runs import breaking, curve, run

from lit_llm.runs import load
from lit_llm.runs.loaded_run import LoadedRun

LINES = [
    {"step": 1, "time": 10.0, "train/loss": 3.0, "lr": 0.1},
    {"step": 2, "time": 11.0, "train/loss": "NaN", "up": "Infinity", "down": "-Infinity"},
    {"step": 2, "time": 12.0, "train/loss": 2.0, "val/loss": 2.5},
]


def made(folder, text):
    (folder / "config.yaml").write_text("trainer: {}\n")
    (folder / "metrics.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
    return load(folder)


def content(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_every_value_of_a_tag_by_step_and_the_later_one_of_a_repeated_step(tmp_path):
    found = made(tmp_path, content(LINES)).scalars
    assert list(found) == ["down", "lr", "train/loss", "up", "val/loss"]
    assert found["train/loss"] == ([1, 2], [3.0, 2.0], [10.0, 12.0]) and found["val/loss"] == ([2], [2.5], [12.0])
    assert found["up"].values == [math.inf] and found["down"].values == [-math.inf]
    assert math.isnan(made(tmp_path, content(LINES[:2])).scalars["train/loss"].values[1])


def test_a_file_cut_anywhere_has_the_lines_before_the_cut_and_one_sentence(tmp_path):
    whole = content(LINES).encode()
    ends = [0, *(at + 1 for at, byte in enumerate(whole) if byte == ord("\n"))]
    for size in sorted({*range(0, len(whole), 7), *ends, *(end - 1 for end in ends if end)}):
        loaded = made(tmp_path, whole[:size])
        complete = sum(end <= size for end in ends) - 1
        expected = {tag for line in LINES[:complete] for tag in line} - {"step", "time"}
        assert set(loaded.scalars) == expected, size
        cut = f"metrics.jsonl ends within line {complete + 1}: that row is left out"
        assert loaded.unread == ([] if size in ends else [cut])


BAD = [
    b"nothing",
    b"\xff\xfe",
    b"[1, 2]",
    b'{"step": 2}',
    b'{"step": -1, "time": 1.0, "a": 1.0}',
    b'{"step": 2.0, "time": 1.0, "a": 1.0}',
    b'{"step": ' + b"9" * 5000 + b', "time": 1.0, "a": 1.0}',
    b'{"step": 9007199254740992, "time": 1.0, "a": 1.0}',
    b'{"step": 2, "time": "NaN", "a": 1.0}',
    b'{"step": 2, "time": 1.0, "a": "1.0", "b": null, "c": [1], "d": true, "e": 1' + b"0" * 400 + b"}",
    b"[" * 100_000,
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[:40].decode(errors="replace"))
def test_a_line_that_is_no_row_is_named_and_left_out(tmp_path, bad):
    first, *others = content(LINES).encode().splitlines(keepends=True)
    loaded = made(tmp_path, b"".join((first, bad + b"\n", bad + b"\n", *others)))
    assert loaded.scalars == made(tmp_path, content(LINES)).scalars
    loaded = made(tmp_path, b"".join((first, bad + b"\n", bad + b"\n", *others)))
    assert loaded.unread == ["metrics.jsonl: 2 of 5 lines are no rows, the first is line 2: they are left out"]


CSV = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}"


@pytest.mark.slow
def test_a_run_with_another_logger_has_curves_and_continues_them_bit_for_bit(folder, capsys):
    """Interrupted in step 6, after its save in step 3. With the CSV logger it has no event file."""
    assert run(capsys, "fit", "--config", "tiny.yaml")[0] == 0
    with pytest.raises(KeyError):
        run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/csv", "--trainer.logger", CSV, *breaking(6))
    half = Path("runs/csv/metrics.jsonl")
    assert [json.loads(line)["step"] for line in half.read_text().splitlines()] == [1, 2, 3, 4, 5]
    half.write_text(half.read_text() + '{"step": 6, "time": 17')  # as a kill may leave it
    assert run(capsys, "fit", "--run", "runs/csv", "--resume", "auto", "--trainer.callbacks=null")[0] == 0
    straight, continued = (
        [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()] for name in ("tiny", "csv")
    )
    assert [row["step"] for row in continued] == list(range(1, 9))
    counted = ("health/validation_unigram_loss", "health/validation_bigram_loss", "health/counted_", "health/commonest_target")
    counted += ("health/unlearned_inputs", "health/unknown_tokens", "health/validation_unseen", "health/unigram_loss")
    counted += ("health/bigram_loss", "health/untouched_embeddings", "health/largest_id", "health/repeated_")
    measured = ("time", "setup/", "throughput/", "memory/", "plan/", *counted)
    exact = [[{tag: row[tag] for tag in row if not tag.startswith(measured)} for row in rows] for rows in (straight, continued)]
    assert exact[0] == exact[1] and "val/loss" in exact[1][-1]
    assert not list(Path("runs/csv").glob("events.*"))
    losses = {row.step: row.loss for row in LoadedRun(Path("runs/csv"), of_lit_llm=False).curve.rows}
    assert losses == pytest.approx(curve(Path("runs/tiny"), "train/loss"), rel=1e-6)  # TensorBoard rounds to fp32
    code, _, _ = run(capsys, "report", "--run", "runs/csv", "--csv", "csv.csv")
    assert code == 0 and len(Path("csv.csv").read_text().splitlines()) > 8
    assert run(capsys, "report", "--run", "runs/csv", "--out", "csv.html")[0] == 0
    assert f"training loss<b>{losses[8]:.4f}</b>" in Path("csv.html").read_text()


def test_without_a_logger_there_are_no_curves(folder, capsys):
    assert run(capsys, "fit", "--config", "tiny.yaml", "--trainer.logger=false", "--trainer.max_steps=3")[0] == 0
    assert not Path("runs/tiny/metrics.jsonl").exists() and load("runs/tiny").scalars == {}
    code, _, err = run(capsys, "report", "--run", "runs/tiny", "--csv", "none.csv")
    assert code == 2 and "it was run without a logger (trainer.logger=false)" in err

"""Curves of runs: as files, out of run folders, and compared with other runs."""

import math
import re
import shutil
from pathlib import Path

import pytest

from lit_llm.__main__ import main
from lit_llm.config.recipe_files import reference_curve
from lit_llm.core.errors import UserError
from lit_llm.runs.curve import Curve, Row
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.runs.metrics_rows import csv_values

RECIPE = """
model: {n_layer: 1, n_head: 2, n_embd: 32, block_size: 16}
optimizer: {class_path: AdamW, init_args: {lr: 0.01}}
data: {class_path: PythonStdlib, init_args: {tokenizer: Bytes, micro_batch_size: 4, global_batch_size: 8}}
schedule: {class_path: Linear, init_args: {warmup_steps: 10, final_ratio: 0.0}}
validation: {class_path: lit_llm.callbacks.ValidateEvery, init_args: {every_n_steps: 20}}
checkpoint: {every_n_steps: 10, keep_last: 9}
trainer: {max_steps: 30, limit_val_batches: 2, log_every_n_steps: 5}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, and its curve as the command wrote it."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LIT_LLM_CACHE", str(folder / "cache"))
        Path("small.yaml").write_text(RECIPE)
        assert main(["fit", "--config", "small.yaml"]) == 0
        assert main(["report", "--run", "runs/small", "--csv", "small.csv", "--note", "hardware=a, b: c"]) == 0
    return folder


@pytest.fixture
def there(run, monkeypatch):
    monkeypatch.chdir(run)
    monkeypatch.setenv("LIT_LLM_CACHE", str(run / "cache"))
    return run


def test_a_curve_has_the_logged_steps_and_what_they_must_be(run):
    curve = Curve.read(run / "small.csv")
    assert curve.facts["hardware"] == "a, b: c" and curve.facts["seed"] == "1337" and "torch 2" in curve.facts["versions"]
    steps = [1, 5, 10, 15, 20, 25, 30]
    assert [row.step for row in curve.rows] == steps
    assert [row.tokens for row in curve.rows] == [128 * step for step in steps]
    # Linear: up over 10 updates, then down to 0 at the last.
    expected = {1: 0.001, 5: 0.005, 10: 0.01, 15: 0.0075, 20: 0.005, 25: 0.0025, 30: 0.0}
    for row in curve.rows:
        assert row.learning_rate == pytest.approx(expected[row.step], rel=1e-6, abs=1e-9)
    assert curve.rows[0].loss == pytest.approx(math.log(257), rel=0.02)
    assert curve.rows[-1].loss < curve.rows[0].loss and all(row.gradient_norm > 0 for row in curve.rows)
    assert [row.step for row in curve.rows if row.validation_loss is not None] == [20, 30]


def test_files_keep_seven_digits_and_gaps(tmp_path):
    curve = Curve(
        {"seed": "1", "command": "fit\n--trainer.max_steps 3"},
        [Row(1, 2.0**40, 0.123456789, None, 1e-30, None), Row(7, loss=math.nan)],
    )
    curve.write(tmp_path / "x" / "c.csv")
    lines = (tmp_path / "x" / "c.csv").read_text().splitlines()
    assert lines[0] == "# seed: 1" and lines[3] == "1,1099511627776,0.1234568,,1e-30,"
    text = (tmp_path / "x" / "c.csv").read_text()
    (tmp_path / "x" / "c.csv").write_text("\ufeff" + text.replace("\n", "\r\n"))  # as spreadsheets save it
    again = Curve.read(tmp_path / "x" / "c.csv")
    assert again.facts == {"seed": "1", "command": "fit --trainer.max_steps 3"}  # `--note` may have several lines
    assert again.rows[0] == Row(1, 2.0**40, 0.1234568, None, 1e-30, None) and math.isnan(again.rows[1].loss)


@pytest.mark.slow
def test_the_same_run_follows_its_curve_and_another_rate_does_not(there, capsys):
    again = ["fit", "--config", "small.yaml", "--check-against", "small.csv"]
    assert main([*again, "--run_dir", "again"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("this run follows small.csv: 7 rows of 7; largest difference 0.000%")
    with pytest.warns(UserWarning, match=r"This run leaves small.csv at step 1: learning rate 0.002, expected 0.001"):
        assert main([*again, "--run_dir", "rate", "--optimizer.lr", "0.02"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("this run leaves small.csv at step 1: learning rate")


@pytest.mark.slow
def test_other_losses_and_other_batches_are_noticed(there, capsys):
    again = ["fit", "--config", "small.yaml", "--check_against", "small.csv"]
    with pytest.warns(UserWarning, match=r"leaves small.csv at step \d+: (validation )?loss"):
        assert main([*again, "--run_dir", "wide", "--model.n_embd", "8", "--check_tolerance", "0.01"]) == 1
    with pytest.warns(UserWarning, match=r"leaves small.csv at step 1: tokens 256, expected 128 \(difference 100.00%"):
        assert main([*again, "--run_dir", "batch", "--data.global_batch_size", "16"]) == 1


@pytest.mark.slow
def test_a_resumed_run_has_one_curve_and_follows_it(there, capsys):
    shutil.copytree("runs/small", "resumed", symlinks=True)
    for late in ("step-00000020.ckpt", "step-00000030.ckpt"):
        shutil.rmtree(f"resumed/checkpoints/{late}")
    arguments = ["--config", "small.yaml", "--run_dir", "resumed", "--resume", "auto", "--check_against", "small.csv"]
    code, said = main(["fit", *arguments]), capsys.readouterr().out
    assert code == 0, said
    assert "this run follows small.csv: 7 rows of 7" in said  # with those before the checkpoint
    assert main(["report", "--run", "resumed", "--csv", "resumed.csv"]) == 0
    assert Curve.read(Path("resumed.csv")).rows == Curve.read(Path("small.csv")).rows
    assert main(["fit", *arguments]) == 0  # nothing is left to train: it is what it was
    assert "this run follows small.csv: 7 rows of 7" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_run_left_before_it_was_interrupted_is_not_forgotten(there, capsys):
    begun = ["fit", "--config", "small.yaml", "--run_dir", "left", "--optimizer.lr", "0.02", "--schedule.total_steps", "30"]
    assert main([*begun, "--trainer.max_steps", "10"]) == 0
    with pytest.warns(UserWarning, match=r"leaves small.csv at step 1: learning rate 0.002"):
        assert main([*begun, "--resume", "auto", "--check_against", "small.csv"]) == 1


def test_a_run_folders_own_configuration_goes_by_the_recipes_name():
    shipped = CurveFollower.of_file(reference_curve("auto", ["runs/quickstart/config.yaml"]), 0.02)
    assert shipped.summary().endswith("recipes/evidence/quickstart.csv (--trainer.log_every_n_steps)")
    with pytest.raises(UserError, match=r"no curve is shipped for other, only for .*quickstart"):
        reference_curve("auto", ["runs/other/config.yaml"])


def test_nan_leaves_the_curve():
    follower = CurveFollower(Curve({}, [Row(1, loss=2.0), Row(2, loss=2.0), Row(3, loss=2.0)]), "it", 0.1)
    follower.log_metrics({"train/loss": 2.19}, step=1)
    follower.log_metrics({"throughput/mfu": 0.5}, step=2)  # not in curves
    follower.log_metrics({"train/loss": 9.0}, step=7)  # not in this one
    assert follower.followed and "1 rows of 3; largest difference 9.500%" in follower.summary()
    with pytest.warns(UserWarning, match="leaves it at step 3: loss nan, expected 2"):
        follower.log_metrics({"train/loss": math.nan}, step=3)
    assert not follower.followed


def test_a_damaged_file_of_a_csv_logger_is_refused(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,2.5\n2," + "2" * 200_000)
    with pytest.raises(UserError, match=r"metrics\.csv is not CSV: field larger"):
        csv_values(tmp_path / "metrics.csv")


def test_what_is_no_step_in_the_file_of_a_csv_logger_is_left_out(tmp_path):
    (tmp_path / "metrics.csv").write_text(f"step,loss\n1,2.5\n{10**400},2.0\n{2**53},2.0\n-3,2.0\n,2.0\n2,\n")
    assert csv_values(tmp_path / "metrics.csv") == {"loss": ([1], [2.5], [0.0])}


def test_nothing_in_common_is_not_following():
    follower = CurveFollower(Curve({}, [Row(5, loss=1.0)]), "it", 0.1)
    assert not follower.followed and "no logged step in common with it" in follower.summary()


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "cannot be read: No such file"),
        ("step,loss\n", "is not a curve: it has no loss"),
        ("step,loss\n1\n", "is not a curve: it has no loss"),
        ("a,b\n1,2\n", "is not a curve: its columns must be step, tokens, loss"),
        ("# seed: 1\n# seed: 2\nstep,loss\n1,2\n2,x\n", "line 5 contains a value that is not a number"),
        ("step,loss\n1," + "2" * 200_000, "is not a curve: field larger than"),
        ('{"text": "' + "a" * 200_000 + '"}', "is not a curve: field larger than"),
    ],
)
def test_an_invalid_curve_is_reported_before_training(there, capsys, text, said):
    Path("odd.csv").unlink(missing_ok=True)
    if text is not None:
        Path("odd.csv").write_text(text)
    assert main(["fit", "--config", "small.yaml", "--run_dir", "none", "--check_against", "odd.csv"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and line.endswith("(--check_against)") and not Path("none").exists()


def test_recipes_without_a_shipped_curve_name_those_that_have_one(there, capsys):
    assert main(["fit", "--config", "small.yaml", "--run_dir", "none", "--check_against", "auto"]) == 2
    assert re.search(r"no curve is shipped for small, only for .*\(--check_against FILE\)", capsys.readouterr().err)
    assert main(["fit", "--config", "small.yaml", "--check_against", "small.csv", "--check_tolerance", "0"]) == 2
    assert "check_tolerance is 0.0, but must be above 0" in capsys.readouterr().err
    assert main(["report", "--run", "nowhere", "--csv", "x.csv"]) == 2
    assert "nowhere is not a run folder" in capsys.readouterr().err

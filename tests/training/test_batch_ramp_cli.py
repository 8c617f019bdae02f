"""The group `batch_ramp` as a user meets it: what is printed, logged, saved, resumed and refused."""

import shutil
from pathlib import Path

import pytest
from recipe_runs import curve, run

RAMP = "batch_ramp: {class_path: BatchRamp, init_args: {tokens_per_batch: [[0, 32], [80, 64]]}}\n"
TOKENS = [32, 64, 96, 160, 224, 288, 352, 416]  # after each of 8 steps: 32 a step until 80 are consumed, then 64


@pytest.fixture
def ramped(folder):
    (folder / "ramp.yaml").write_text(RAMP)
    return ["fit", "--config", "tiny.yaml", "--config", "ramp.yaml", "--run_dir", "runs/ramped"]


def test_a_ramp_is_printed_logged_and_saved_for_resume(ramped, capsys):
    code, out, _ = run(capsys, *ramped)
    assert code == 0
    said = [line for line in out.splitlines() if "sequences of" in line or line.startswith("run:")]
    assert said[:2] == [
        "step: 2 sequences of 16 = 32 tokens, in 1 micro-batch on each of 1 process",
        "from step 4 on: 4 sequences of 16 = 64 tokens, in 2 micro-batches on each of 1 process",
    ]
    assert said[2].startswith("run: 8 steps = 416 tokens = ")
    assert list(curve(Path("runs/ramped"), "progress/tokens").values()) == TOKENS
    assert run(capsys, "fit", "--config", "runs/ramped/config.yaml", "--run_dir", "runs/again")[0] == 0
    assert curve(Path("runs/again"), "train/loss") == curve(Path("runs/ramped"), "train/loss")


def test_each_stage_has_the_largest_micro_batches_of_its_own(ramped, capsys):
    """1 of 3 sequences, then 2 of 4. Without a limit a step is one micro-batch, with losses that differ by rounding."""
    sizes = [
        "--batch_ramp.tokens_per_batch",
        "[[0, 48], [80, 128]]",
        "--data.global_batch_size",
        "8",
        "--trainer.max_steps",
        "4",
    ]
    code, out, _ = run(capsys, *ramped, *sizes, "--data.micro_batch_size", "4")
    assert code == 0
    assert "step: 3 sequences of 16 = 48 tokens, in 1 micro-batch on each of 1 process, of 3 (data.micro_batch_size 4)" in out
    assert "from step 3 on: 8 sequences of 16 = 128 tokens, in 2 micro-batches on each of 1 process\n" in out
    code, out, _ = run(capsys, *ramped[:-1], "runs/whole", *sizes, "--data.micro_batch_size", "null")
    assert code == 0 and "= 128 tokens, in 1 micro-batch on each of 1 process\n" in out
    whole, own = (curve(Path(folder), "train/loss") for folder in ("runs/whole", "runs/ramped"))
    assert list(own) == [1, 2, 3, 4] and own == pytest.approx(whole, rel=1e-4)


def test_another_micro_batch_continues_it_and_another_ramp_is_refused(ramped, capsys):
    run(capsys, *ramped, "--trainer.max_steps", "14", "--schedule.total_steps", "14")
    straight = {name: curve(Path("runs/ramped"), name) for name in ("train/loss", "progress/tokens")}
    shutil.rmtree("runs/ramped")
    assert run(capsys, *ramped, "--trainer.max_steps", "3", "--schedule.total_steps", "14")[0] == 0
    again = [*ramped, "--resume", "auto", "--trainer.max_steps", "14"]
    code, _, err = run(capsys, *again, "--batch_ramp.tokens_per_batch", "[[0, 64]]")
    assert code == 2
    assert "batch_ramp.tokens_per_batch was [[0, 32], [80, 64]] in the checkpoint and is [[0, 64]]" in err
    code, _, err = run(capsys, *again, "--batch_ramp", "null")
    assert code == 2 and "and is none" in err
    code, *_ = run(capsys, *again, "--data.micro_batch_size", "1", "--schedule.total_steps", "14")
    assert code == 0
    assert curve(Path("runs/ramped"), "progress/tokens") == straight["progress/tokens"]
    assert curve(Path("runs/ramped"), "train/loss") == pytest.approx(straight["train/loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--batch_ramp.tokens_per_batch", "[[0, 40], [80, 64]]"], ["40 tokens per batch", "= 16", "use 32 or 48 tokens"]),
        (["--batch_ramp.tokens_per_batch", "[[5, 32]]"], ["must begin at 0 tokens", "--batch_ramp.tokens_per_batch"]),
        (["--batch_ramp.tokens_per_batch", "[[0, 32]]"], ["ends with 32 tokens", "--data.global_batch_size 2"]),
    ],
)
def test_a_mistake_in_the_ramp_is_reported_before_anything_is_written(ramped, capsys, flags, expected):
    code, _, err = run(capsys, *ramped, *flags)
    assert code == 2 and all(line.startswith("error: ") for line in err.strip().splitlines()), err
    for part in expected:
        assert part in err, err
    assert not Path("runs").exists()

"""Runs that branch off from a checkpoint of another: annealed, extended, themselves interrupted; the original stays."""

import math
from pathlib import Path

import pytest
from recipe_runs import RECIPE, breaking, curve, run

from lit_llm.runs.resume import find_start

DECAY = str(Path(__file__).parents[2] / "recipes" / "decay.yaml")
STABLE = "runs/x/checkpoints/stable.ckpt"
BRANCH = ["fit", "--config", "wsd.yaml", "--config", DECAY, "--additional_steps", "4", "--resume", STABLE]
EXACT = ("train/loss", "lr", "grad/norm", "progress/tokens")


def contents(run_dir: Path) -> dict[str, bytes | str]:
    return {str(p): str(p.readlink()) if p.is_symlink() else p.read_bytes() for p in run_dir.rglob("*") if not p.is_dir()}


@pytest.fixture
def stable(folder, made, capsys):
    """A WSD run of 10 steps whose stable phase ends after step 7."""
    recipe = RECIPE.replace("Cosine, init_args: {warmup_steps: 2}", "WSD, init_args: {warmup_steps: 2, decay_steps: 3}")
    Path("wsd.yaml").write_text(recipe.replace("max_steps: 8", "max_steps: 10"))
    made(folder, lambda: run(capsys, "fit", "--config", "wsd.yaml", "--run_dir", "runs/x"))
    assert Path(STABLE).readlink() == Path("step-00000007.ckpt")
    return Path("runs/x")


@pytest.mark.slow
def test_extended_in_its_stable_phase_a_run_is_the_longer_run_bit_for_bit(stable, capsys):
    longer = ["fit", "--config", "wsd.yaml", "--trainer.max_steps", "16"]
    run(capsys, *longer, "--run_dir", "runs/straight")
    before = contents(stable)
    code, _, err = run(capsys, *longer, "--run_dir", "runs/branch", "--resume", STABLE)
    assert code == 0 and "rate jumps" not in err
    assert contents(stable) == before
    run(capsys, *longer, "--run_dir", "runs/x", "--resume", STABLE)  # in its own folder, whose decay is left behind
    for tag in EXACT:
        straight = curve(Path("runs/straight"), tag)
        assert len(straight) == 16 and curve(stable, tag) == straight, tag
        assert curve(Path("runs/branch"), tag) == {step: straight[step] for step in range(8, 17)}, tag
    assert curve(stable, "lr")[13] == curve(stable, "lr")[8] > curve(stable, "lr")[14]  # the new decay


@pytest.mark.parametrize(
    "trained",
    [
        ["--schedule", "WSD", "--schedule.warmup_steps", "2", "--schedule.decay_steps", "3"],
        pytest.param(
            ["--schedule", "Constant", "--schedule.warmup_steps", "2", "--optimizer", "AdamW", "--optimizer.lr", "0.003"],
            marks=pytest.mark.slow,
        ),
        pytest.param(  # amid a cosine
            ["--schedule.total_steps", "20", "--schedule.final_ratio", "0.3", "--optimizer.adamw_lr", "0.004"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["WSD Muon", "constant AdamW", "cosine two rates"],
)
def test_a_decay_begins_at_the_rates_of_the_checkpoint_and_ends_at_zero(folder, capsys, trained):
    run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/x", "--trainer.max_steps", "10", *trained)
    resume = ["--resume", "runs/x/checkpoints/step-00000009.ckpt" if "total" in trained[0] else "runs/x/checkpoints/last.ckpt"]
    if "WSD" in trained:
        resume = ["--resume", STABLE]
    before = contents(Path("runs/x"))
    flags = ["--config", "tiny.yaml", "--config", DECAY, "--additional_steps", "4", *resume]
    code, out, err = run(capsys, "fit", *flags, *trained[-4:] if "--optimizer" in trained else [])
    assert code == 0 and "rate jumps" not in err, err
    assert contents(Path("runs/x")) == before
    names = [tag for tag in ("lr", "lr/embedding", "lr/vector") if tag == "lr" or "adamw_lr" in str(trained)]
    for name in names:
        rates, step = curve(Path("runs/x"), name), int(out.split("resume: from step ")[1].split(",")[0])
        assert rates[step] > 0
        expected = {step + i: rates[step] * (1 - math.sqrt(i / 4)) for i in range(1, 5)}
        assert curve(Path("runs/x-decay"), name) == pytest.approx(expected, rel=1e-5, abs=1e-9), name
    assert sorted(curve(Path("runs/x-decay"), "train/loss")) == list(expected)


@pytest.mark.slow
def test_a_branch_broken_at_any_time_continues_with_the_same_command_or_by_its_folder(stable, capsys):
    run(capsys, *BRANCH, "--run_dir", "runs/whole")
    with pytest.raises(KeyError, match="broken"):
        run(capsys, *BRANCH, *breaking(9), "--run_dir", "runs/x-decay")  # before it has a checkpoint of its own
    with pytest.raises(KeyError, match="broken"):
        run(capsys, *BRANCH, *breaking(10), "--run_dir", "runs/x-decay")  # after that of step 9
    code, out, _ = run(capsys, *BRANCH)
    assert code == 0 and "resume: from step 9, runs/x-decay/" in out
    for tag in (*EXACT, "val/loss"):
        assert curve(Path("runs/x-decay"), tag) == curve(Path("runs/whole"), tag), tag
    for again in (BRANCH, ["fit", "--run", "runs/x-decay", "--resume", "auto"], ["fit", "--run", "runs/x-decay"]):
        before = contents(Path("runs/x-decay/checkpoints"))
        code, out, _ = run(capsys, *again)  # it is done, and its end does not move
        assert code == 0 and "at step 11" in out
        assert contents(Path("runs/x-decay/checkpoints")) == before
    code, out, _ = run(capsys, "validate", "--run", "runs/x-decay")
    assert code == 0 and "at step 11" in out


@pytest.mark.slow
def test_a_branch_follows_the_checkpoint_that_the_link_named_when_it_began(stable, capsys):
    with pytest.raises(KeyError, match="broken"):
        run(capsys, *BRANCH, *breaking(9), "--run_dir", "runs/x-decay")
    Path(STABLE).unlink()
    Path(STABLE).symlink_to("step-00000010.ckpt")
    code, out, _ = run(capsys, "fit", "--run", "runs/x-decay", "--resume", "auto", "--trainer.callbacks", "null")
    assert code == 0 and "resume: from step 7" in out
    code, _, err = run(capsys, *BRANCH)
    assert code == 2 and "holds a run that did not start from" in err


@pytest.mark.slow
def test_what_would_write_over_a_run_or_not_end_is_refused(stable, capsys):
    run(capsys, "fit", "--config", "wsd.yaml", "--run_dir", "runs/other", "--trainer.max_steps", "5")
    before = contents(Path("runs"))
    branch = ["--resume", STABLE]
    for flags, said in (
        (["--resume", "auto", "--additional_steps", "3"], "counts from the checkpoint that --resume PATH names"),
        (["--additional_steps", "3"], "counts from the checkpoint that --resume PATH names"),
        ([*branch, "--additional_steps", "3", "--run_dir", "runs/x"], "needs a folder of its own: runs/x is that of"),
        (["--resume", "auto", "--replace", "true"], "give one of them"),
        ([*branch, "--replace", "true", "--run_dir", "runs/x"], "that --replace true would set aside"),
        ([*branch, "--run_dir", "runs/other"], "--replace true, or write elsewhere with --run_dir"),
    ):
        code, _, err = run(capsys, "fit", "--config", "wsd.yaml", *flags)
        assert code == 2 and said in err and err.count("error: ") == 1, err
        assert contents(Path("runs")) == before


@pytest.mark.slow
def test_options_given_to_the_optimizer_hold_after_a_resume_and_another_optimizer_is_refused(folder, capsys):
    run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "4")
    auto = ["fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "5"]
    code, _, err = run(capsys, *auto, "--optimizer", "AdamW")
    assert code == 2 and "trained with lit_llm.optim.MuonAdamW, whose state does not fit torch.optim.adamw.AdamW" in err
    run(capsys, *auto, "--optimizer.momentum", "0.5", "--optimizer.betas", "[0.8, 0.95]", "--accept_changes", "true")
    from lit_llm.checkpoint.disk_format import read

    groups = read("runs/tiny/checkpoints/last.ckpt")["optimizer_states"][0]["param_groups"]
    assert {group.get("momentum") for group in groups} == {0.5, None}
    assert {group.get("betas") for group in groups} == {(0.8, 0.95), None}


def test_a_warmup_share_keeps_its_number_when_resumed_extended_and_branched(folder, capsys):
    """Rates by the formulas: t / 3 of the peak, then half a cosine to a tenth at the end of the run."""
    share = ["fit", "--config", "tiny.yaml", "--schedule.warmup_fraction=0.375", "--optimizer=AdamW", "--optimizer.lr=0.01"]

    def rates(steps: int) -> list[float]:
        decay = [0.001 + 0.009 * (1 + math.cos(math.pi * (t - 3) / (steps - 3))) / 2 for t in range(4, steps + 1)]
        return [0.01 * t / 3 for t in (1, 2, 3)] + decay

    with pytest.raises(KeyError, match="broken"):
        run(capsys, *share, *breaking(5), "--run_dir", "runs/tiny")
    code, out, err = run(capsys, *share, "--resume", "auto")
    assert code == 0 and "resume: from step " in out and "warmup" not in err
    assert list(curve(Path("runs/tiny"), "lr").values()) == pytest.approx(rates(8), rel=1e-5)
    assert "warmup_steps: 3\n" in Path("runs/tiny/config.yaml").read_text()

    longer = [*share, "--trainer.max_steps", "16", "--resume"]  # its share would be 6 steps
    code, out, err = run(capsys, *longer, "runs/tiny/checkpoints/step-00000006.ckpt", "--run_dir", "runs/branch")
    assert code == 0 and "stays at the checkpoint's 3 steps, not 6" in err and "schedule.warmup_steps changes it" in err
    assert "schedule.warmup" not in out and "rate jumps" not in err
    assert list(curve(Path("runs/branch"), "lr").values()) == pytest.approx(rates(16)[6:], rel=1e-5)
    counted = ["--additional_steps", "10", "--run_dir", "runs/counted"]
    code, *_ = run(capsys, *share, *counted, "--resume", "runs/tiny/checkpoints/step-00000006.ckpt")
    assert code == 0 and curve(Path("runs/counted"), "lr") == curve(Path("runs/branch"), "lr")
    code, out, err = run(capsys, "plan", *longer[1:], "auto")
    assert code == 0 and "warmup 3 steps" in out

    code, *_ = run(capsys, *longer, "auto")  # in its own folder, from its end on
    assert code == 0 and "warmup_steps: 3\n" in Path("runs/tiny/config.yaml").read_text()
    assert [curve(Path("runs/tiny"), "lr")[t] for t in range(9, 17)] == pytest.approx(rates(16)[8:], rel=1e-5)
    code, _, err = run(capsys, *longer, "auto", "--schedule.warmup_steps", "6")  # a number is compared like any setting
    assert code == 2 and "warmup_fraction" in err
    code, _, err = run(capsys, "fit", "--run", "runs/tiny", "--resume", "auto", "--schedule.warmup_steps", "6")
    assert code == 2 and "schedule.warmup_steps was 3 in the checkpoint and is 6" in err


def test_a_branch_without_a_checkpoint_of_its_own_starts_from_its_origin(stable):
    folder = Path("runs/early")
    folder.mkdir()
    (folder / "config.yaml").write_text(f"resume: {STABLE}\n")
    saved, origin = find_start(folder, "auto", replace=False)
    assert saved is not None and saved.step == 7 and origin == Path(STABLE)

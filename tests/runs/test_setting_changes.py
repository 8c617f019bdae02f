"""What may change between two parts of a run: every setting has a rule, every rule is applied, and the page shows the table."""

import re
from pathlib import Path

import pytest
import yaml
from recipe_runs import curve, run

from lit_llm.checkpoint import disk_format
from lit_llm.config.groups import GROUPS, OPTIONS
from lit_llm.config.parse import parse
from lit_llm.runs.setting_changes import RULES, Change, rule, setting_changes

PAGE = (Path(__file__).parents[2] / "docs/reference/resume-settings.md").read_text()
MORE = ["fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "5"]


@pytest.fixture
def trained(folder, made, capsys):
    made(folder, lambda: run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "4"))
    return folder


# -- the table ----------------------------------------------------------------------------------------------------------


def test_every_group_option_and_setting_of_the_trainer_has_a_rule():
    flags = ["--optimizer", "AdamW", "--trainer.max_steps", "5", "--data", "TextFiles", "--data.paths", "x"]
    flags += [
        "--time_breakdown",
        "TimeBreakdown",
        "--histograms",
        "Histograms",
        "--gradient_noise",
        "GradientNoise",
        "--profile",
        "Profile",
        "--samples",
        "TextSamples",
        "--tasks",
        "TaskScores",
    ]  # off by default
    settings = parse("fit", flags).settings()
    assert {key.partition(".")[0] for key in settings} >= set(GROUPS)
    names = {option.name for option in OPTIONS if "fit" in option.commands}
    assert [key for key in [*settings, *GROUPS, *names] if key != "trainer" and rule(key) is None] == []


def test_no_rule_names_a_setting_that_does_not_exist():
    settings = set(parse("fit", ["--optimizer", "AdamW", "--data", "TextFiles", "--data.paths", "x"]).settings())
    settings |= {option.name for option in OPTIONS} | {"optimizer.ns_dtype", *GROUPS}
    assert [prefix for prefix in RULES if not any(key == prefix or key.startswith(f"{prefix}.") for key in settings)] == []


def test_the_page_lists_every_prefix_under_its_rule():
    table = PAGE.partition("| rule | settings |")[2].partition("\n\n")[0]
    listed = {row.split("|")[1].strip(): set(re.findall(r"`([\w.]+)`", row.split("|")[2])) for row in table.splitlines()[2:]}
    assert listed == {change.value: {prefix for prefix, other in RULES.items() if other is change} for change in Change}


# -- comparing ----------------------------------------------------------------------------------------------------------


def test_a_class_with_other_arguments_is_one_difference():
    saved = {"schedule": "lit_llm.callbacks.Cosine", "schedule.warmup_steps": 2}
    other = {"schedule": "lit_llm.callbacks.WSD", "schedule.warmup_steps": 9}
    refused, announced = setting_changes(saved, other, accepted=False, compares_data=True)
    assert announced == [] and refused == [
        "schedule was lit_llm.callbacks.Cosine in the checkpoint and is lit_llm.callbacks.WSD (--schedule "
        "lit_llm.callbacks.Cosine, or --accept_changes true)"
    ]
    assert len(setting_changes(saved, {"schedule": None}, accepted=False, compares_data=True)[0]) == 1


def test_a_rate_that_has_no_effect_is_announced_as_such():
    saved = {"schedule": "lit_llm.callbacks.Decay", "optimizer.lr": 0.1}
    _, announced = setting_changes(saved, saved | {"optimizer.lr": 0.2}, accepted=True, compares_data=True)
    assert announced == ["optimizer.lr 0.1 → 0.2 (no effect: Decay starts at the rate of the checkpoint)"]


# -- through the command line -------------------------------------------------------------------------------------------

REFUSED = {
    "optimizer.lr": "0.5",
    "optimizer.betas": "[0.5, 0.9]",
    "optimizer.weight_decay": "0.3",
    "schedule.warmup_steps": "3",
    "gradient_norm.clip": "0.25",
    "seed_everything": "5",
    "loss.z_loss": "0.1",
    "spike_guard.sigma": "3.0",
    "trainer.gradient_clip_val": "0.5",
}


@pytest.mark.slow
def test_each_setting_that_makes_another_run_is_refused_by_flag_and_by_an_edited_config(trained, capsys):
    before = sorted(Path("runs").rglob("*"))
    for key, value in REFUSED.items():
        code, _, err = run(capsys, *MORE, f"--{key}", value)
        assert code == 2 and re.search(rf"error: {key} was .* in the checkpoint and is .*--accept_changes true", err), err
    config = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())
    config["optimizer"]["init_args"]["lr"] = 0.5
    config["seed_everything"] = 5
    Path("runs/tiny/config.yaml").write_text(yaml.safe_dump(config))
    code, _, err = run(capsys, "fit", "--run", "runs/tiny", "--resume", "auto", "--trainer.max_steps", "5")
    assert code == 2 and "optimizer.lr was " in err and "seed_everything was 1337 in the checkpoint and is 5" in err
    assert sorted(Path("runs").rglob("*")) == before


@pytest.mark.slow
def test_accepted_changes_are_announced_and_take_effect(trained, capsys):
    flags = ["--optimizer.lr", "0.5", "--gradient_norm.clip", "0.25", "--optimizer.weight_decay", "0.3", "--schedule", "null"]
    code, out, _ = run(capsys, *MORE, *flags, "--accept_changes", "true")
    assert code == 0
    said = [line for line in out.splitlines() if line.startswith("resume: ")]
    for line in ("resume: optimizer.lr ", "resume: gradient_norm.clip 1.0 → 0.25", "resume: optimizer.weight_decay "):
        assert any(each.startswith(line) for each in said), said
    saved = disk_format.read("runs/tiny/checkpoints/last.ckpt")
    groups = saved["optimizer_states"][0]["param_groups"]
    assert [group["lr"] for group in groups] == [0.5, 0.01, 0.01]  # no schedule: the configured rate, not the checkpoint's
    assert {group["weight_decay"] for group in groups if group["name"] != "vector"} == {0.3}
    assert curve(Path("runs/tiny"), "grad/norm_clipped")[5] == pytest.approx(0.25, rel=1e-5)
    assert saved["settings"]["optimizer.lr"] == 0.5
    code, *_ = run(capsys, *MORE[:-1], "6", *flags)  # the accepted settings are now the run's
    assert code == 0


def test_free_changes_are_silent_and_others_announced(trained, capsys):
    flags = ["--checkpoint.every_n_steps", "2", "--validation.every_n_steps", "3", "--trainer.log_every_n_steps", "2"]
    code, out, _ = run(capsys, *MORE, *flags, "--data.micro_batch_size", "1", "--trainer.precision", "bf16-mixed")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("resume: ") and "→" in line] == [
        "resume: data.micro_batch_size 2 → 1",
        "resume: trainer.max_steps 4 → 5 (a schedule that ends with the run ends there)",
        "resume: trainer.precision null → bf16-mixed",
    ]


def test_a_fused_optimizer_is_not_silently_the_checkpoints(folder, capsys):
    flags = ["--optimizer", "AdamW"]
    run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "4", *flags)
    code, out, _ = run(capsys, *MORE, *flags, "--optimizer.fused", "true")
    assert code == 0 and "resume: optimizer.fused null → true" in out
    groups = disk_format.read("runs/tiny/checkpoints/last.ckpt")["optimizer_states"][0]["param_groups"]
    assert [group["fused"] for group in groups] == [True] * len(groups)

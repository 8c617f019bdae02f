"""`fit --help` has every key on a few screens; `--help GROUP` has one group in full."""

import re
from typing import get_args

import pytest
import yaml

from lit_llm.__main__ import main
from lit_llm.callbacks.learning_rate_schedules import DecayShape
from lit_llm.config.arguments import leaves
from lit_llm.config.groups import CLASSES, GROUPS
from lit_llm.config.parser import known_classes
from lit_llm.config.resolve import resolved
from lit_llm.models.attention_kernel_choice import AttentionKernel


def printed(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_fit_help_has_every_key_in_at_most_200_lines(capsys):
    text = printed(capsys, "fit", "--help")
    assert len(text.splitlines()) <= 200 and max(map(len, text.splitlines())) <= 128
    values = yaml.safe_load(resolved([]))
    keys = {key for key, _ in leaves(values) if not key.startswith("architecture")}
    keys |= {
        "schedule.warmup_steps",
        "schedule.warmup_fraction",
        "schedule.warmup_tokens",
        "optimizer.lr",
        "data.paths",
        "checkpoint.every_n_steps",
        "init_from",
        "resume",
    }
    assert len(keys) > 120
    for key in keys:
        assert f"--{key} " in text or f"--{key}," in text, key
    for group in CLASSES:
        for name, cls in known_classes(group).items():
            assert name in text or not cls.__module__.startswith("lit_llm."), name
    assert "Environment variables do not override settings." in text


def test_flags_of_one_command_are_in_its_help_alone(capsys):
    assert "--chat_template = null  " in printed(capsys, "prepare", "--help")
    assert printed(capsys, "prepare", "--help").startswith(
        "usage: python -m lit_llm prepare --data CLASS --data.paths FILES --out"
    )
    assert "--full_batch = false  " in printed(capsys, "check", "--help")
    assert " --chat_template" not in printed(capsys, "fit", "--help")
    for command in ("prepare", "validate", "test", "check", "find-lr", "find-batch"):
        text = printed(capsys, command, "--help")
        assert len(text.splitlines()) < 50 and text.endswith("of a recipe: python -m lit_llm fit --help\n"), command
        assert "--optimizer" not in text, command


def test_the_help_of_a_group_describes_its_keys_and_names_its_classes(capsys):
    text = printed(capsys, "fit", "--help", "schedule")
    assert "--schedule.warmup_steps int, at least 0 (default: 0)" in text
    # Not only these: test modules may define further ones.
    assert {"Constant", "Cosine", "Decay", "InverseSquareRoot", "Linear", "WSD"} <= set(re.findall(r"\w+", text))
    full = printed(capsys, "validate", "--help=schedule.WSD")
    assert "--schedule.decay_fraction float, above 0 and at most 1 (default: 0.2)" in full
    assert f"--schedule.shape Literal{list(get_args(DecayShape))} (default" in printed(capsys, "fit", "--help", "schedule.WSD")
    assert f"--compute.attention Literal{list(get_args(AttentionKernel))} (default" in printed(capsys, "fit", "-h", "compute")
    assert "--trainer.max_steps" in printed(capsys, "fit", "-h", "trainer")
    assert "--model.moe.top_k int, at least 1 (default: 2)" in printed(capsys, "fit", "--help", "model.moe")
    assert "--help model.latent, --help model.moe." in printed(capsys, "fit", "--help", "model")


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "architecture"])
def test_every_group_has_help(capsys, group):
    assert f"{group}: " in printed(capsys, "fit", "--help", group)


def test_every_key_in_the_help_of_fit_has_help_of_its_own(capsys):
    listed = re.findall(r"--([a-z_]+(?:\.[a-z_0-9]+)*) ", printed(capsys, "fit", "--help"))
    keys = {key for key in listed if key not in ("config", "run", "help", "print_config")} | {"trainer.strategy.shard"}
    assert len(keys) > 200
    for key in sorted(keys - {"architecture"}):
        if key not in GROUPS:
            text = printed(capsys, "fit", "--help", key)
            assert f"  --{key} " in text or text.startswith(f"{key}: "), key  # the latter: a key that has further keys
    assert "(default: 0.2)" in printed(capsys, "fit", "--help", "schedule.WSD.decay_fraction")


def test_help_for_what_does_not_exist_is_refused(capsys):
    assert main(["fit", "--help", "shedule"]) == 2
    assert "there is no group shedule; groups are model," in capsys.readouterr().err
    assert main(["fit", "--help", "schedule.WDS"]) == 2
    assert "schedule cannot be WDS; known are Constant," in capsys.readouterr().err
    for wrong, said in (("model.meo", "latent, moe"), ("trainer.devises", "trainer.devices? (--help trainer")):
        assert main(["fit", "--help", wrong]) == 2
        assert said in capsys.readouterr().err


def test_print_config_prints_every_setting(capsys):
    assert printed(capsys, "fit", "--config", "quickstart", "--print_config", "true") == resolved(["--config", "quickstart"])


def test_environment_variables_do_not_override_settings(monkeypatch):
    before = resolved([])
    for name in ("PL_TRAINER__MAX_STEPS", "PL_TRAINER_MAX_STEPS", "PL_MODEL__N_LAYER", "LIT_LLM_MODEL__N_LAYER"):
        monkeypatch.setenv(name, "7")
    assert resolved([]) == before

"""One number sets size, batch, length and rates; everything behind it overrides what follows."""

from pathlib import Path

import pytest
import yaml

from lit_llm.__main__ import main
from lit_llm.config.arguments import read
from lit_llm.config.resolve import resolved
from lit_llm.core.errors import UserError
from lit_llm.plan.planned_recipe import build_to_plan, planned_run


def values(*words: str) -> dict[str, object]:
    """The last value that the arguments give to each key."""
    arguments = read(["--config", *words])
    return {a.key: yaml.safe_load(a.value) if isinstance(a.value, str) else a.value for a in arguments.assignments}


# By hand. n = 4: 20 * 12 * 4 * 256² tokens, 1/27 of those of 12, and 2^19 / 27^0.383 = 2^17.18 tokens a step.
# n = 24: 8 times the tokens, 2^19 * 8^0.383 = 2^20.15 tokens a step, √2 times the rate, √2/8 times the decay.
BY_HAND = {
    4: {"n_embd": 256, "n_head": 4, "global_batch_size": 128, "max_steps": 480, "lr": 0.01, "weight_decay": 1.35},
    12: {"n_embd": 768, "n_head": 12, "global_batch_size": 512, "max_steps": 3240, "lr": 0.02, "weight_decay": 0.1},
    24: {"n_embd": 1536, "n_head": 24, "global_batch_size": 1024, "max_steps": 12960, "lr": 0.0283, "weight_decay": 0.0177},
}


@pytest.mark.parametrize("depth", BY_HAND)
def test_what_follows_from_a_depth_is_what_the_header_says(depth):
    found = values("dial", "--depth", str(depth))
    expected = BY_HAND[depth]
    assert found["model.n_layer"] == depth
    for key, value in expected.items():
        group = {"n_embd": "model", "n_head": "model", "global_batch_size": "data", "max_steps": "trainer"}.get(
            key, "optimizer"
        )
        assert found[f"{group}.{key}"] == value, key
    assert found["optimizer.adamw_lr"] == found["optimizer.lr"]
    assert (found["model.base_width"], found["model.base_depth"]) == (256, 4)


def test_files_and_flags_override_and_every_value_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("base: dial\ndepth: 8\noptimizer: {init_args: {lr: 0.5}}\n")
    found = values("mine.yaml", "--model.n_head", "4")
    assert (found["model.n_layer"], found["model.n_embd"], found["model.n_head"]) == (8, 512, 4)
    assert found["optimizer.lr"] == 0.5 and found["optimizer.adamw_lr"] == 0.0141
    assert values("mine.yaml", "--depth=6")["model.n_layer"] == 6  # a flag wins, wherever it stands
    shown = yaml.safe_load(resolved(["--depth", "6", "--config", "dial"]))
    assert shown["model"]["n_layer"] == 6 and shown["trainer"]["max_steps"] == 810 and "depth" not in shown


def test_every_depth_can_be_planned():
    for depth in (2, 64):
        settings, _ = planned_run(build_to_plan(["--config", "dial", "--depth", str(depth)], devices=8))
        assert settings.model.n_layer == depth and settings.tokens == pytest.approx(
            20 * 12 * depth * (64 * depth) ** 2, rel=5e-3
        )


@pytest.mark.parametrize("value", ["1", "65", "12.5", "-4", "true", "deep", ""])
def test_a_depth_out_of_range_is_one_sentence(value, capsys):
    with pytest.raises(UserError, match=r"^depth is .*, but must be a whole number from 2 to 64 \(--depth\)$"):
        read(["--config", "dial", f"--depth={value}"])


def test_a_recipe_without_a_dial_takes_no_depth(capsys):
    assert main(["plan", "--config", "quickstart", "--depth", "4"]) == 2
    assert "--depth needs a recipe whose sizes follow from it: --config dial" in capsys.readouterr().err
    with pytest.raises(UserError, match="--depth needs a value"):
        read(["--config", "dial", "--depth"])

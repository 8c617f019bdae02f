"""recipes/debug.yaml: twenty small steps of any recipe, deterministic."""

import re

import pytest
import yaml

from lit_llm.__main__ import main

# What debug.yaml replaces: sizes, and what does not fit them.
SIZES = {"n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "mlp_width", "block_size", "vocab_size", "eos_id"}
LEFT_OUT = {"window", "layers", "rope_scaling"}


def debug(recipe, capsys, *arguments):
    assert main(["fit", "--config", recipe, "--config", "debug", "--replace", "true", *arguments]) == 0
    return re.findall(r"step +(\d+)/20 +loss ([\d.]+)", capsys.readouterr().out)


@pytest.mark.parametrize(
    "recipe",
    [
        "gemma3-1b",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("minicpm-2.4b", "gpt3-125m", "llama3.1-8b")),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("gpt2-124m", "olmo2-1b", "pythia-160m")),
    ],
)
def test_a_recipe_keeps_its_architecture_and_runs_small(tmp_path, monkeypatch, capsys, recipe):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    lines = debug(recipe, capsys)
    assert [int(step) for step, _ in lines] == list(range(1, 21))
    assert float(lines[-1][1]) < float(lines[0][1]) - 0.1
    ran = yaml.safe_load((tmp_path / "runs/debug/config.yaml").read_text())
    main(["recipes", "show", recipe])
    whole = yaml.safe_load(capsys.readouterr().out)
    assert {key for key in ran["model"] if ran["model"][key] != whole["model"][key]} <= SIZES | LEFT_OUT
    assert all(not ran["model"][key] for key in LEFT_OUT)
    assert ran["optimizer"] == whole["optimizer"] and ran["schedule"]["class_path"] == whole["schedule"]["class_path"]

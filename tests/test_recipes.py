"""The shipped recipes: parameters as their headers state them, and ten real steps of each with width and depth shrunk."""

import gzip
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_llm.cli import RecipeParser
from lit_llm.data.shards import ShardWriter
from lit_llm.model import GPT, GPTConfig

RECIPES = Path(__file__).parents[1] / "recipes"
VOCABULARY = {"quickstart": 2048, "gpt2-124m": 50257, "gpt2-xl": 50257}  # null in the recipe where it follows the data


def test_every_recipe_is_tested_here():
    overlays = {"decay", "profile"}  # tests/test_branches.py, and below
    assert {p.stem for p in RECIPES.glob("*.yaml")} == {*VOCABULARY, *overlays}


@pytest.mark.parametrize("name", VOCABULARY)
def test_the_header_states_the_parameters_of_the_built_model(name):
    path = RECIPES / f"{name}.yaml"
    parser = RecipeParser()
    parser.add_class_arguments(GPTConfig, "model")
    import yaml

    config = parser.instantiate(parser.parse_object({"model": yaml.safe_load(path.read_text())["model"]})).model
    config.vocab_size = VOCABULARY[name]
    stated = re.search(r"^# parameters\s+([\d,]+)", path.read_text(), re.M)
    assert stated is not None
    with torch.device("meta"):
        assert GPT(config).num_parameters() == int(stated[1].replace(",", ""))


def fit(tmp_path, monkeypatch, capsys, *arguments):
    from lit_llm.__main__ import main

    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    code = main(["fit", "--run_dir", str(tmp_path / "run"), "--trainer.accelerator", "cpu", *arguments])
    out = capsys.readouterr().out
    assert code == 0
    losses = [float(x) for x in re.findall(r"step\s+\d+/\d+\s+loss ([\d.]+)", out)]
    return losses, float(re.search(r"val/loss\s*│\s*([\d.]+)", out)[1])


SMALL = [
    "--model.n_layer",
    "2",
    "--model.n_head",
    "2",
    "--model.n_embd",
    "32",
    "--model.block_size",
    "64",
    "--data.micro_batch_size",
    "2",
    "--data.global_batch_size",
    "4",
    "--trainer.max_steps",
    "10",
    "--schedule.warmup_steps",
    "2",
    "--trainer.limit_val_batches",
    "4",
]


def test_ten_steps_of_quickstart(tmp_path, monkeypatch, capsys):
    losses, val = fit(
        tmp_path, monkeypatch, capsys, "--config", str(RECIPES / "quickstart.yaml"), *SMALL, "--data.tokenizer", "Bytes"
    )
    assert losses[0] == pytest.approx(math.log(257), rel=0.03)
    assert losses[-1] < losses[0] - 0.3 and val < losses[0]


def test_the_profile_overlay_records_three_steps_of_a_recipe(tmp_path, monkeypatch, capsys):
    recipe, overlay = str(RECIPES / "quickstart.yaml"), str(RECIPES / "profile.yaml")
    shorter = ["--trainer.max_steps", "5", "--profile.wait", "1", "--data.tokenizer", "Bytes"]
    fit(tmp_path, monkeypatch, capsys, "--config", recipe, "--config", overlay, *SMALL, *shorter)
    with gzip.open(tmp_path / "run" / "profile" / "rank0.2.pt.trace.json.gz", "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {f"ProfilerStep#{step}" for step in (2, 3, 4)} <= names and "ProfilerStep#5" not in names


def test_ten_steps_of_gpt2_124m_on_shards(tmp_path, monkeypatch, capsys):
    # A stream with structure to learn: runs of consecutive ids.
    stream = (np.arange(20_000) % 500 + 1000 * (np.arange(20_000) // 10_000)).astype(np.int64)
    for name in ("train", "val"):
        with ShardWriter(tmp_path, name, vocab_size=50257, shard_tokens=7_000) as writer:
            writer.write(stream)
    losses, val = fit(
        tmp_path,
        monkeypatch,
        capsys,
        "--config",
        str(RECIPES / "gpt2-124m.yaml"),
        *SMALL,
        "--optimizer.lr",
        "0.01",
        "--data.train",
        f"{tmp_path}/train_*.bin",
        "--data.val",
        f"{tmp_path}/val_*.bin",
        "--data.num_workers",
        "0",
        "--loss.chunk_size",
        "50",
    )
    assert losses[0] == pytest.approx(math.log(50257), rel=0.03)
    assert losses[-1] < losses[0] - 0.3 and val < losses[0]

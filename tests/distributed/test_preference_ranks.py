"""Preferences on two gloo processes, compared with one, and continued by another layout from a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import layouts
import numpy as np
import pytest
import torch
from launch import run_ranks

from lit_llm.core.errors import UserError
from lit_llm.data import Bytes
from lit_llm.ingest.shard_manifest import Manifest, SplitInfo
from lit_llm.ingest.shards import ShardWriter

SCRIPT = Path(layouts.__file__)
LOSSES = {
    "dpo": {"loss": "dpo", "beta": 0.5, "label_smoothing": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.5},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.3},
}
LAYOUTS = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": {"shard": 2}},
    "tp": {"strategy": {"shard": 1, "tensor_parallel": 2}},
    "cp": {"strategy": {"shard": 1, "context": 2}},
    "pp": {"strategy": {"shard": 1, "pipeline": 2}, "micro_batch_size": 2},
}
MOE = {"experts": 4, "top_k": 2, "expert_width": 12, "router": "sigmoid"}
EXPERTS = {"model": "experts", "settings": {"moe": MOE, "n_layer": 2}, "balance": 0.02}


def write_pairs(folder: Path) -> None:
    """Pairs of 8 to 30 bytes, of which the end of each document is learned."""
    draw, splits = np.random.default_rng(0), {}
    for name, pairs in (("train", 60), ("val", 13)):
        with ShardWriter(folder, name, vocab_size=Bytes().vocab_size, shard_tokens=301, masked=True) as writer:  # cuts pairs
            for _ in range(pairs):
                prompt = draw.integers(97, 123, draw.integers(2, 6))
                for low in (97, 110):  # chosen answers have other letters
                    answer = draw.integers(low, low + 16, draw.integers(2, 10))
                    mask = np.concatenate((np.zeros(len(prompt)), np.ones(len(answer))))
                    writer.write(np.concatenate((prompt, answer)), mask.astype(np.uint8))
                    writer.end_document()
        rest = {"targets": writer.targets, "mask_blake2b": writer.mask_blake2b}
        sizes = writer.tokens, writer.tokens, 0, writer.tokens
        splits[name] = SplitInfo(writer.documents, *sizes, writer.tokens_blake2b, tuple(writer.shards), **rest)
    Manifest("bytes", Bytes().vocab_size, None, None, splits, pairs=True).write(folder)
    Bytes().save(folder)


def recipe(kind: str, **more) -> dict:
    base = {"init_from": "base/step-00000002.ckpt", "precision": "64-true", "parameters": True, "steps": 4}
    return base | {"pairs": LOSSES[kind]} | more


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "text.txt").write_text(layouts.TEXT)
    layouts.train(folder, steps=2, to="base", validate=False)
    layouts.train(folder, steps=2, to="experts", validate=False, **EXPERTS)
    (folder / "pairs").mkdir()
    write_pairs(folder / "pairs")
    return folder


@pytest.mark.slow
def test_two_processes_train_as_one_and_continue_each_other(folder):
    alone = {loss: layouts.train(folder, **recipe(loss)) for loss in LOSSES}
    (stored,) = (folder / "pairs").glob("reference-*.bin")
    content = stored.read_bytes()
    adapted = layouts.train(folder, **recipe("dpo", lora={"rank": 3}))
    stored.unlink()  # the first job computes it on two ranks
    jobs = {f"dpo / {name}": recipe("dpo", **layout) for name, layout in LAYOUTS.items()}
    jobs |= {f"{loss} / cp": recipe(loss, **LAYOUTS["cp"]) for loss in ("ipo", "simpo")}
    jobs["dpo / chunked"] = recipe("dpo", **LAYOUTS["tp"], loss={"chunk_size": 5})
    jobs |= {f"lora / {name}": recipe("dpo", lora={"rank": 3}, **LAYOUTS[name]) for name in ("fsdp2", "tp", "cp", "pp")}
    of_experts = recipe("dpo", init_from="experts/step-00000002.ckpt", **EXPERTS)
    alone["experts"] = layouts.train(folder, **of_experts)
    jobs |= {f"experts / {name}": of_experts | LAYOUTS[name] for name in ("tp", "pp")}
    jobs["experts / ep"] = of_experts | {"strategy": {"shard": 2, "expert": 2}}
    jobs["dpo / fsdp2"] |= {"save_at": 2, "to": "saved"}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    reports = run_ranks(SCRIPT, 2, folder, folder / "jobs.json", timeout=500)
    for name in jobs:
        expected = {"lora": adapted, **alone}[name.partition(" / ")[0]]
        for report in reports:
            for key in ("train/loss", "grad/norm"):
                assert report[name][key] == pytest.approx(expected[key], rel=1e-6), (name, key)
            for key, values in expected["means"].items():
                if key == "train/accuracy":  # of step 1, margins are 0 but for rounding
                    values, report[name]["means"][key] = values[1:], report[name]["means"][key][1:]
                assert report[name]["means"][key] == pytest.approx(values, rel=1e-6, abs=1e-9), (name, key)
            assert report[name]["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-6), name
            for parameter, value in report[name]["parameters"].items():
                torch.testing.assert_close(value, expected["parameters"][parameter], rtol=1e-6, atol=1e-9, msg=name)
    assert len(stored.read_bytes()) == len(content)  # of two ranks: rounded elsewhere
    again = layouts.train(folder, **recipe("dpo", resume="saved/step-00000002.ckpt", init_from=None))
    assert again["train/loss"] == pytest.approx(alone["dpo"]["train/loss"][2:], rel=1e-6)
    assert again["val/loss"] == pytest.approx(alone["dpo"]["val/loss"], rel=1e-6)


def test_the_first_loss_is_that_of_no_difference_and_accuracy_rises(folder):
    for precision in ("32-true", "bf16-mixed"):
        found = layouts.train(folder, **recipe("dpo", precision=precision, steps=20, validate=False))
        assert found["train/loss"][0] == pytest.approx(math.log(2), abs=1e-6), precision  # ε changes nothing there
    packed_otherwise = recipe("dpo", precision="32-true", steps=1, validate=False, settings={"block_size": 64})
    before = sorted((folder / "pairs").glob("reference-*.bin"))
    assert layouts.train(folder, **packed_otherwise)["train/loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert sorted((folder / "pairs").glob("reference-*.bin")) == before  # the stored one was read
    assert abs(found["means"]["train/accuracy"][0] - 0.5) < 0.3 and min(found["means"]["train/accuracy"][-3:]) >= 0.9


@pytest.mark.parametrize(
    ("name", "more", "changed"),
    [
        ("base", {}, {"rope_theta": 100.0}),
        ("base", {}, {"window": 4}),
        ("experts", EXPERTS, {**EXPERTS["settings"], "moe": MOE | {"top_k": 1}}),
    ],
    ids=["rope_theta", "window", "top_k"],
)
def test_other_settings_of_the_model_have_another_reference(folder, name, more, changed):
    """The model that training starts from is its own reference, so the first loss is ln 2 with any settings."""
    first = recipe("dpo", precision="32-true", steps=1, validate=False, init_from=f"{name}/step-00000002.ckpt", **more)
    first["pairs"] = {"loss": "dpo", "beta": 0.5}
    for settings in (first.get("settings", {}), changed):
        found = layouts.train(folder, **{**first, "settings": settings})
        assert found["train/loss"][0] == pytest.approx(math.log(2), abs=1e-6), settings


def test_a_resumed_run_continues_bit_for_bit_and_needs_its_reference(folder):
    kept = recipe("dpo", precision="32-true", steps=6, save_at=3, validate=False)
    whole = layouts.train(folder, **kept, to="whole")
    again = layouts.train(folder, **{**kept, "init_from": None}, resume="whole/step-00000003.ckpt", to="rest")
    assert again["train/loss"] == whole["train/loss"][3:] and again["means"] == {k: v[3:] for k, v in whole["means"].items()}
    assert all(torch.equal(again["parameters"][name], value) for name, value in whole["parameters"].items())
    files = {file: file.read_bytes() for file in (folder / "pairs").glob("reference-*.bin")}
    resume = {**kept, "init_from": None, "resume": "whole/step-00000003.ckpt"}
    for broken, said in ((None, "is gone"), (b"x" * 40, "damaged"), (b"", "damaged")):
        for file, content in files.items():
            file.unlink(missing_ok=True)
            if broken is not None:
                file.write_bytes(broken or content[:-1])
        with pytest.raises(UserError, match=said):
            layouts.train(folder, **resume)
    for file, content in files.items():
        file.write_bytes(content)
    with pytest.raises(UserError, match="--init_from"):
        layouts.train(folder, **recipe("dpo", init_from=None))

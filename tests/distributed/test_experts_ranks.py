"""A mixture of experts trains alike on any number of ranks, micro-batches and with recomputation."""

import json
import math
from pathlib import Path

import layouts
import pytest
import torch
from launch import run_ranks

JOB = {"model": "experts", "steps": 6, "ignoring": True, "balance": 0.02, "parameters": True}
"""Targets are ignored, so ranks and micro-batches have different numbers of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    (folder / "text.txt").write_text(layouts.TEXT)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return {name: layouts.train(folder, optimizer=name, **JOB) for name in ("MuonAdamW", "AdamW")}


def compare(found: dict, wanted: dict) -> None:
    """In fp32 sums differ by their order: relative 5e-6 after six steps. Counts are whole numbers, and so equal."""
    for name in ("train/loss", "val/loss"):
        assert found[name] == pytest.approx(wanted[name], rel=5e-6), name
    assert found["grad/norm"] == pytest.approx(wanted["grad/norm"], rel=5e-5)
    for name in ("load", "biases", "shares"):
        assert found[name] == wanted[name], name
    for name in ("entropy", "z"):
        assert found["means"][name] == pytest.approx(wanted["means"][name], rel=5e-5), name
    for name, value in found["parameters"].items():
        assert torch.allclose(value, wanted["parameters"][name], rtol=1e-3, atol=2e-4), name


def test_training_moves_the_biases_by_the_counts_of_the_global_batch(alone):
    """A bias moves by 0.02 up or down in each step, so after six it is an even multiple of 0.02, unless a load was the mean."""
    result = alone["MuonAdamW"]
    assert all(abs(each / 0.02 - round(each / 0.02)) < 1e-4 and abs(each) <= 0.1201 for row in result["biases"] for each in row)
    assert any(abs(each) >= 0.0399 for row in result["biases"] for each in row)
    assert all(math.isclose(sum(row), 1, rel_tol=1e-6) for row in result["shares"])
    assert len(result["load"]) == 6 and all(1 <= load <= 2.5 for load in result["load"])  # at most all tokens: 5 / 2


@pytest.mark.parametrize("micro_batch_size", [1, 4, 8])
def test_micro_batches_change_rounding_only(folder, alone, micro_batch_size):
    compare(layouts.train(folder, optimizer="AdamW", micro_batch_size=micro_batch_size, **JOB), alone["AdamW"])


@pytest.mark.parametrize("settings", [{"activation_checkpointing": "full"}, {"activation_checkpointing": "cheap"}], ids=str)
def test_recomputation_changes_nothing(folder, alone, settings):
    found = layouts.train(folder, optimizer="MuonAdamW", compute=settings, **JOB)
    assert found["train/loss"] == alone["MuonAdamW"]["train/loss"] and found["biases"] == alone["MuonAdamW"]["biases"]


def test_two_ranks_change_rounding_only(folder, alone):
    """Two shards hold rows of five experts."""
    jobs = {
        "ddp": {"strategy": "ddp", "optimizer": "MuonAdamW", **JOB},
        "fsdp2": {"strategy": {"shard": 2}, "optimizer": "MuonAdamW", "compute": {"activation_checkpointing": "full"}, **JOB},
        "replicas": {"strategy": {"replicate": 2, "shard": 1}, "optimizer": "MuonAdamW", **JOB},
        "fsdp2 in bf16": {"strategy": {"shard": 2}, "optimizer": "AdamW", "precision": "bf16-mixed", **JOB},
        "fsdp2, AdamW": {"strategy": {"shard": 2}, "optimizer": "AdamW", "micro_batch_size": 1, **JOB},
    }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    reports = run_ranks(Path(layouts.__file__), 2, folder, folder / "jobs.json", timeout=400)
    narrow = layouts.train(folder, optimizer="AdamW", precision="bf16-mixed", **JOB)
    for name, job in jobs.items():
        for report in reports:
            if "precision" not in job:
                compare(report[name], alone[job["optimizer"]])
            else:  # experts are gathered in bf16: the same bits. Sums differ by their order, which moves some tokens
                assert report[name]["train/loss"] == pytest.approx(narrow["train/loss"], rel=5e-3)
                assert report[name]["train/loss"][0] == pytest.approx(narrow["train/loss"][0], rel=1e-5)

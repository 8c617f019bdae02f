"""A mixture of experts trains alike with any number of micro-batches and with recomputation. Ranks: test_expert_parallel.py."""

import math

import layouts
import pytest
from test_expert_parallel import compare
from test_strategies import make

JOB = {"model": "experts", "steps": 6, "ignoring": True, "balance": 0.02, "parameters": True}
"""Targets are ignored, so ranks and micro-batches have different numbers of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def alone(folder):
    return {name: layouts.train(folder, optimizer=name, **JOB) for name in ("MuonAdamW", "AdamW")}


def test_training_moves_the_biases_by_the_counts_of_the_global_batch(alone):
    """A bias moves by 0.02 up or down in each step, so after six it is an even multiple of 0.02, unless a load was the mean."""
    result = alone["MuonAdamW"]
    assert all(abs(each / 0.02 - round(each / 0.02)) < 1e-4 and abs(each) <= 0.1201 for row in result["biases"] for each in row)
    assert any(abs(each) >= 0.0399 for row in result["biases"] for each in row)
    assert all(math.isclose(sum(row), 1, rel_tol=1e-6) for row in result["shares"])
    assert len(result["load"]) == 6 and all(1 <= load <= 2.5 for load in result["load"])  # at most all tokens: 5 / 2


@pytest.mark.parametrize("micro_batch_size", [1, 4, 8])
def test_micro_batches_change_rounding_only(folder, alone, micro_batch_size):
    compare(layouts.train(folder, optimizer="AdamW", micro_batch_size=micro_batch_size, **JOB), alone["AdamW"], rel=5e-6)


@pytest.mark.parametrize("settings", [{"activation_checkpointing": "full"}, {"activation_checkpointing": "cheap"}], ids=str)
def test_recomputation_changes_nothing(folder, alone, settings):
    found = layouts.train(folder, optimizer="MuonAdamW", compute=settings, **JOB)
    assert found["train/loss"] == alone["MuonAdamW"]["train/loss"] and found["biases"] == alone["MuonAdamW"]["biases"]

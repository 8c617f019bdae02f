"""Runs of other configurations than the matrix's, killed and continued: six of them, or all with `make soak`."""

import random

import configurations
import matrix
import pytest
from configurations import CONFIGURATIONS

QUICK = (
    "adamw cosine",
    "two shards, lora",
    "two ranks, health",
    "two shards, experts, ema",
    "preferences",
    "two shards, distillation",
)


@pytest.fixture(scope="module")
def prepared(launcher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("configurations")
    configurations.prepare(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_killed_run_of_another_configuration_is_bit_exact_too(launcher, prepared, name):
    configuration = next(each for each in CONFIGURATIONS if each.name == name)
    result = matrix.run_cell(launcher, configuration, prepared, {}, kills=1, rng=random.Random(name))
    assert result.differing == 0, "\n".join(result.found)
    assert result.kills >= 1 and result.values > 400


@pytest.mark.soak
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_every_configuration(launcher, prepared, configuration):
    result = matrix.run_cell(launcher, configuration, prepared, {}, kills=5, rng=random.Random(configuration.name))
    assert result.differing == 0, "\n".join(result.found)
    assert result.kills >= 1 and result.values > 400  # draws beyond the end of a run do not count

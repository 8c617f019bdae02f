"""Killed anywhere, continued exactly: a few cells of the matrix, and under `make soak` all of them."""

import random

import matrix
import pytest
from matrix import CELLS, Cell

QUICK = [
    Cell("1 single", 2, 2, 0.2, "bf16-mixed"),
    Cell("2 ddp", 2, 0, 0.2, "32-true"),
    Cell("2 fsdp2", 1, 2, 0.2, "bf16-mixed"),
]


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_killed_again_and_again_a_run_is_the_straight_one_bit_for_bit(launcher, folder, known, cell):
    result = matrix.run_cell(launcher, cell, folder, known, kills=2, rng=random.Random(str(cell)))
    assert result.differing == 0, "\n".join(result.found)
    assert result.kills >= 1 and result.values > 400


@pytest.mark.soak
def test_the_whole_matrix(launcher, folder, capsys):
    with capsys.disabled():
        results, summary = matrix.report(launcher, CELLS, folder, kills=4, seed=1)
    assert [result.found for result in results if result.differing] == [], summary
    assert all(result.kills for result in results) and sum(result.in_a_save for result in results) > len(CELLS)

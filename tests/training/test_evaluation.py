"""lit_llm.training.evaluation: sums over batches and ranks, one division at the end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch import run_ranks

from lit_llm.models.loss import LossSums
from lit_llm.training.evaluation import Evaluation

ONE_PROCESS = SimpleNamespace(strategy=SimpleNamespace(reduce=lambda sums, reduce_op: sums))
# Three quarters of the tokens at perplexity 5.23, one quarter at 5.684: together 5.340, while their average is 5.457.
UNEVEN = [(96 * math.log(5.23), 96), (32 * math.log(5.684), 32)]


def measured(batches: list[tuple[float, int]], *, bytes_of_a_token: int | None = None) -> dict[str, float]:
    """The row of batches with these sums of nats and numbers of targets."""
    token_bytes = None if bytes_of_a_token is None else torch.full((2,), bytes_of_a_token)
    evaluation = Evaluation(token_bytes, (), torch.device("cpu"))
    for nll, count in batches:
        sums = LossSums(torch.tensor(nll), torch.tensor(nll, dtype=torch.float64), torch.tensor(count))
        evaluation.add({"targets": torch.ones(1, count if count < 1000 else 0, dtype=torch.int64)}, sums, parts=1)
    return evaluation.row("val", ONE_PROCESS)


def test_perplexity_of_the_worked_example() -> None:
    assert measured([(0.0 + 2.3 + 0.69, 3)])["val/perplexity"] == pytest.approx(2.71, abs=5e-3)


def test_uneven_batches_are_weighted_by_their_tokens() -> None:
    assert measured(UNEVEN)["val/perplexity"] == pytest.approx(5.340, abs=5e-4)


def test_bits_per_byte_of_uniform_guessing_is_the_bits_of_a_token_over_its_bytes() -> None:
    guess = (10 * math.log(256), 10)
    assert measured([guess], bytes_of_a_token=1)["val/bits_per_byte"] == pytest.approx(8.0, rel=1e-6)
    assert measured([guess, guess], bytes_of_a_token=4)["val/bits_per_byte"] == pytest.approx(2.0, rel=1e-6)


def test_ignored_targets_have_no_bytes_and_ranks_that_share_a_batch_have_parts_of_it() -> None:
    evaluation = Evaluation(torch.tensor([0, 3]), (), torch.device("cpu"))
    for _ in range(2):  # as of two ranks, each with half of the nats and targets
        sums = LossSums(torch.tensor(1.0), torch.tensor(6 * math.log(2)), torch.tensor(1))
        evaluation.add({"targets": torch.tensor([[1, -100, 1]])}, sums, parts=2)
    assert evaluation.row("val", ONE_PROCESS)["val/bits_per_byte"] == pytest.approx(2.0)


def test_without_counted_targets_the_result_is_nan() -> None:
    row = measured([(0.0, 0)], bytes_of_a_token=1)
    assert len(row) == 3 and all(math.isnan(value) for value in row.values())


def test_a_long_validation_keeps_the_digits_of_small_batches() -> None:
    batches = [(2.0**40, 2**39), *[(1.5, 1)] * 64]  # a float32 sum of 2^40 would not notice any of the small ones
    assert measured(batches)["val/loss"] == pytest.approx((2.0**40 + 96) / (2**39 + 64), rel=1e-14)


TWO = """
import json, sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from launch import report
from lit_llm.models.loss import LossSums
from lit_llm.training.evaluation import Evaluation

def reduce(sums, reduce_op):
    dist.all_reduce(sums)
    return sums

dist.init_process_group("gloo")
evaluation = Evaluation(None, (), torch.device("cpu"))
nll, count = json.loads(sys.argv[1])[dist.get_rank()]
evaluation.add({}, LossSums(torch.tensor(0.0), torch.tensor(nll, dtype=torch.float64), torch.tensor(count)), parts=1)
report(loss=torch.tensor(evaluation.row("val", SimpleNamespace(strategy=SimpleNamespace(reduce=reduce)))["val/loss"]))
"""


def test_two_processes_equal_one(tmp_path: Path) -> None:
    for each in run_ranks(TWO, 2, tmp_path, json.dumps(UNEVEN)):
        assert float(each["loss"]) == pytest.approx(measured(UNEVEN)["val/loss"], rel=1e-7)

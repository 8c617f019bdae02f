"""lit_llm.training.evaluation: sums over batches and ranks, one division at the end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import run_ranks

from lit_llm.models.loss import LossSums
from lit_llm.training.accumulation import wide
from lit_llm.training.evaluation import Evaluation

CPU = torch.device("cpu")
ALONE: Any = SimpleNamespace(strategy=SimpleNamespace(reduce=lambda tensor, reduce_op: tensor))
# Three quarters of the tokens at perplexity 5.23, one quarter at 5.684: together 5.340, while their average is 5.457.
UNEVEN = [(96 * math.log(5.23), 96), (32 * math.log(5.684), 32)]


def add(evaluation: Evaluation, nll: Any, count: int, targets: list[int] | None = None) -> None:
    nll = torch.as_tensor(nll)
    evaluation.add({"targets": torch.tensor([targets or [-100]])}, LossSums(nll, nll, torch.tensor(count)), parts=1)


def mean_loss() -> Evaluation:
    return Evaluation(None, (), CPU)


def test_mean_loss_of_the_worked_example() -> None:
    sums = mean_loss()
    add(sums, torch.tensor([0.0, 2.3, 0.69]).sum(), 3)
    row = sums.row("val", ALONE)
    assert row.keys() == {"val/loss", "val/perplexity"}
    assert row["val/perplexity"] == pytest.approx(2.71, abs=5e-3) and row["val/loss"] == pytest.approx(2.99 / 3)


def test_uneven_batches_are_weighted_by_their_tokens() -> None:
    sums = mean_loss()
    for nll_sum, count in UNEVEN:
        add(sums, nll_sum, count)
    assert sums.row("val", ALONE)["val/perplexity"] == pytest.approx(5.340, abs=5e-4)


def test_bits_per_byte_of_uniform_guessing_is_the_bits_of_a_token_over_its_bytes() -> None:
    sums = Evaluation(torch.tensor([1, 7]), (), CPU)
    add(sums, 10 * math.log(256), 10, [0] * 10 + [-100])  # 10 tokens of a byte each: 8 bits for each byte
    assert sums.row("test", ALONE)["test/bits_per_byte"] == pytest.approx(8.0, rel=1e-6)
    add(sums, 10 * math.log(256), 10, [1] * 10)  # 10 more tokens that cover 70 bytes
    assert sums.row("test", ALONE)["test/bits_per_byte"] == pytest.approx(2 * 8 * 10 / 80, rel=1e-6)


def test_without_counted_targets_the_result_is_nan() -> None:
    sums = Evaluation(torch.tensor([1, 7]), (), CPU)
    for _ in range(2):  # without a batch, and with one that has none
        row = sums.row("val", ALONE)
        assert math.isnan(row["val/loss"]) and math.isnan(row["val/bits_per_byte"])
        add(sums, 0.0, 0)


def test_a_long_validation_keeps_the_digits_of_small_batches() -> None:
    sums = mean_loss()
    add(sums, 2.0**40, 2**39)  # 2 nats per token
    for _ in range(64):
        add(sums, 1.5, 1)  # a float32 sum of 2^40 would not notice any of these
    assert sums.sums.tolist() == [2.0**40 + 96, 2**39 + 64, 0]
    assert sums.row("val", ALONE)["val/loss"] == pytest.approx((2.0**40 + 96) / (2**39 + 64), rel=1e-14)


def test_sums_stay_float64_whatever_the_module_is_cast_to() -> None:
    module = torch.nn.Module()
    module.evaluation = mean_loss()
    module.to(torch.bfloat16)  # what bf16-true precision does to a LightningModule
    add(module.evaluation, torch.tensor(1.0, dtype=torch.bfloat16), 3)
    assert module.evaluation.sums.dtype == torch.float64
    assert module.evaluation.row("val", ALONE)["val/loss"] == pytest.approx(1 / 3, rel=1e-14)


def test_a_device_without_float64_gets_float32_sums() -> None:
    assert wide(torch.device("mps")) == torch.float32 and wide(torch.device("cuda", 1)) == torch.float64


def test_sums_keep_no_graph_alive() -> None:
    sums = mean_loss()
    add(sums, torch.ones((), requires_grad=True) * 2, 1)
    assert not sums.sums.requires_grad


TWO = """
import json, sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from launch import report
from lit_llm.models.loss import LossSums
from lit_llm.training.evaluation import Evaluation

dist.init_process_group("gloo")
nll, count = json.loads(sys.argv[1])[dist.get_rank()]
evaluation = Evaluation(torch.tensor([2]), (), torch.device("cpu"))
nll = torch.tensor(nll, dtype=torch.float64)
evaluation.add({"targets": torch.zeros(1, count, dtype=torch.int64)}, LossSums(nll, nll, torch.tensor(count)), parts=1)

def reduce(tensor, reduce_op):
    dist.all_reduce(tensor)
    return tensor

report(row=evaluation.row("val", SimpleNamespace(strategy=SimpleNamespace(reduce=reduce))))
"""


def test_two_processes_equal_one(tmp_path: Path) -> None:
    one = Evaluation(torch.tensor([2]), (), CPU)
    for nll_sum, count in UNEVEN:
        add(one, torch.tensor(nll_sum, dtype=torch.float64), count, [0] * count)
    for each in run_ranks(TWO, 2, tmp_path, json.dumps(UNEVEN)):
        assert each["row"] == pytest.approx(one.row("val", ALONE), rel=1e-14)

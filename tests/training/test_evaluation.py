"""lit_llm.training.evaluation: sums over batches and ranks, one division at the end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from launch import run_ranks

from lit_llm.training.evaluation import BitsPerByte, MeanLoss

# Three quarters of the tokens at perplexity 5.23, one quarter at 5.684: together 5.340, while their average is 5.457.
UNEVEN = [(96 * math.log(5.23), 96), (32 * math.log(5.684), 32)]


def test_mean_loss_of_the_worked_example() -> None:
    metric = MeanLoss()
    metric.update(torch.tensor([0.0, 2.3, 0.69]).sum(), torch.tensor(3))
    assert math.exp(metric.compute().item()) == pytest.approx(2.71, abs=5e-3)


def test_uneven_batches_are_weighted_by_their_tokens() -> None:
    metric = MeanLoss()
    for nll_sum, count in UNEVEN:
        metric.update(nll_sum, count)
    assert math.exp(metric.compute().item()) == pytest.approx(5.340, abs=5e-4)


def test_bits_per_byte_of_uniform_guessing_is_the_bits_of_a_token_over_its_bytes() -> None:
    metric = BitsPerByte()
    metric.update(torch.tensor(10 * math.log(256)), 10)  # 10 tokens of a byte each: 8 bits for each byte
    assert metric.compute().item() == pytest.approx(8.0, rel=1e-6)
    metric.update(torch.tensor(10 * math.log(256)), torch.tensor(70))  # 10 more tokens that cover 70 bytes
    assert metric.compute().item() == pytest.approx(2 * 8 * 10 / 80, rel=1e-6)


@pytest.mark.parametrize("metric_class", [MeanLoss, BitsPerByte])
def test_without_counted_pairs_the_result_is_nan(metric_class: type[MeanLoss | BitsPerByte]) -> None:
    metric = metric_class()
    metric.update(torch.tensor(0.0), torch.tensor(0))
    assert math.isnan(metric.compute())


def test_a_long_validation_keeps_the_digits_of_small_batches() -> None:
    metric = MeanLoss()
    metric.update(torch.tensor(2.0**40), 2**39)  # 2 nats per token
    for _ in range(64):
        metric.update(torch.tensor(1.5), 1)  # a float32 sum of 2^40 would not notice any of these
    assert metric.nll_sum.item() == 2.0**40 + 96
    assert metric.compute().item() == pytest.approx((2.0**40 + 96) / (2**39 + 64), rel=1e-14)


def test_sums_stay_float64_whatever_the_module_is_cast_to() -> None:
    module = torch.nn.Module()
    module.mean_loss = MeanLoss()
    module.to(torch.bfloat16)  # what bf16-true precision does to a LightningModule
    module.half()
    module.mean_loss.update(torch.tensor(1.0, dtype=torch.bfloat16), 3)
    assert module.mean_loss.nll_sum.dtype == torch.float64
    assert module.mean_loss.compute().item() == pytest.approx(1 / 3, rel=1e-14)


def test_a_device_without_float64_gets_float32_sums() -> None:
    def to_mps(t: torch.Tensor) -> torch.Tensor:
        if t.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return t

    metric = MeanLoss()
    metric._apply(to_mps)
    metric.update(torch.tensor(2.0), torch.tensor(2))
    metric.reset()  # to defaults on that device
    metric.update(torch.tensor(3.0), torch.tensor(3))
    assert metric.nll_sum.dtype == torch.float32
    assert metric.compute().item() == pytest.approx(1.0)


def test_reset_starts_over() -> None:
    metric = MeanLoss()
    metric.update(5.0, 1)
    metric.reset()
    metric.update(1.0, 1)
    assert metric.compute().item() == pytest.approx(1.0)


def test_metrics_keep_no_graph_alive() -> None:
    metric = MeanLoss()
    metric.update(torch.ones((), requires_grad=True) * 2, 1)
    assert metric.nll_sum.grad_fn is None


TWO = """
import json, sys
import torch, torch.distributed as dist
from launch import report
from lit_llm.training.evaluation import BitsPerByte, MeanLoss

dist.init_process_group("gloo")
mean_loss, bits_per_byte = MeanLoss(), BitsPerByte()
nll_sum, count = json.loads(sys.argv[1])[dist.get_rank()]
mean_loss.update(torch.tensor(nll_sum, dtype=torch.float64), count)
bits_per_byte.update(torch.tensor(nll_sum, dtype=torch.float64), 2 * count)
report(computed=[mean_loss.compute(), bits_per_byte.compute()])
"""


def test_two_processes_equal_one(tmp_path: Path) -> None:
    mean_loss, bits_per_byte = MeanLoss(), BitsPerByte()
    for nll_sum, count in UNEVEN:
        mean_loss.update(nll_sum, count)
        bits_per_byte.update(nll_sum, 2 * count)
    one = [mean_loss.compute(), bits_per_byte.compute()]
    for each in run_ranks(TWO, 2, tmp_path, json.dumps(UNEVEN)):
        torch.testing.assert_close(each["computed"], one, rtol=1e-14, atol=0)

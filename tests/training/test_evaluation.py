"""lit_llm.training.evaluation: sums over batches and ranks, one division at the end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from launch import run_ranks

from lit_llm.models.loss import LossSums
from lit_llm.training.accumulation import LossMeans, wide
from lit_llm.training.evaluation import Evaluation

# Three quarters of the tokens at perplexity 5.23, one quarter at 5.684: together 5.340, while their average is 5.457.
UNEVEN = [(96 * math.log(5.23), 96), (32 * math.log(5.684), 32)]
CPU = torch.device("cpu")


def new(token_bytes: list[int] | None = None) -> Evaluation:
    return Evaluation("val", LossMeans(), None if token_bytes is None else torch.tensor(token_bytes), CPU, of_tokens=True)


def add(evaluation: Evaluation, nll: float, targets: list[int]) -> None:
    total, count = torch.tensor(nll), torch.tensor(sum(target >= 0 for target in targets))
    evaluation.update({"targets": torch.tensor([targets])}, LossSums(total, total, count), parts=1)


def test_uneven_batches_are_weighted_by_their_tokens() -> None:
    evaluation = new()
    for nll, count in UNEVEN:
        add(evaluation, nll, [0] * count)
    found = evaluation.compute()
    assert found == {"val/loss": pytest.approx(math.log(5.340), abs=1e-4), "val/perplexity": pytest.approx(5.340, abs=5e-4)}


def test_bits_per_byte_of_uniform_guessing_is_the_bits_of_a_token_over_its_bytes() -> None:
    evaluation = new([1, 7])
    add(evaluation, 10 * math.log(256), [0] * 10 + [-100])  # 10 tokens of a byte each: 8 bits for each byte
    add(evaluation, 10 * math.log(256), [1] * 10)  # 10 more tokens that cover 70 bytes
    assert evaluation.compute()["val/bits_per_byte"] == pytest.approx(2 * 8 * 10 / 80, rel=1e-6)


def test_without_counted_targets_all_values_are_nan() -> None:
    evaluation = new([1])
    add(evaluation, 0.0, [-100])
    found = evaluation.compute()
    assert list(found) == ["val/loss", "val/perplexity", "val/bits_per_byte"] and all(map(math.isnan, found.values()))


def test_sums_are_float64_where_the_device_has_it() -> None:
    assert wide(CPU) == torch.float64 and wide(torch.device("mps")) == torch.float32
    evaluation = new()
    evaluation.update({}, LossSums(torch.zeros(()), torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(3)), parts=1)
    assert evaluation.compute()["val/loss"] == pytest.approx(1 / 3, rel=1e-14)


def test_sums_keep_no_graph_alive() -> None:
    evaluation, nll = new(), torch.ones((), requires_grad=True) * 2
    evaluation.update({}, LossSums(nll, nll, torch.tensor(1)), parts=1)
    assert not evaluation.sums.requires_grad


TWO = """
import json, sys
import torch, torch.distributed as dist
from launch import report
from lit_llm.models.loss import LossSums
from lit_llm.training.accumulation import LossMeans
from lit_llm.training.evaluation import Evaluation

dist.init_process_group("gloo")
evaluation = Evaluation("val", LossMeans(), torch.tensor([2]), torch.device("cpu"), of_tokens=True)
nll, count = json.loads(sys.argv[1])[dist.get_rank()]
sums = LossSums(torch.zeros(()), torch.tensor(nll, dtype=torch.float64), torch.tensor(count))
evaluation.update({"targets": torch.zeros(1, count, dtype=torch.int64)}, sums, parts=1)

report(row=evaluation.compute())
"""


def test_two_processes_equal_one(tmp_path: Path) -> None:
    nll, count = (sum(each) for each in zip(*UNEVEN, strict=True))
    expected = {"loss": nll / count, "perplexity": math.exp(nll / count), "bits_per_byte": nll / count / 2 / math.log(2)}
    for each in run_ranks(TWO, 2, tmp_path, json.dumps(UNEVEN)):
        assert each["row"] == {f"val/{name}": pytest.approx(value, rel=1e-14) for name, value in expected.items()}

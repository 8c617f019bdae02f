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

# Three quarters of the tokens at perplexity 5.23, one quarter at 5.684.
UNEVEN = [(96 * math.log(5.23), 96), (32 * math.log(5.684), 32)]
CPU = torch.device("cpu")


def test_sums_are_float64_where_the_device_has_it() -> None:
    assert wide(CPU) == torch.float64 and wide(torch.device("mps")) == torch.float32
    evaluation = Evaluation("val", LossMeans(), None, CPU, of_tokens=True)
    evaluation.update({}, LossSums(torch.zeros(()), torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(3)), parts=1)
    assert evaluation.compute()["val/loss"] == pytest.approx(1 / 3, rel=1e-14)


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

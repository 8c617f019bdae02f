"""Fitted speeds equal those that generated the steps."""

import sys
from pathlib import Path

import pytest

from lit_llm.models.config import GPTConfig
from lit_llm.plan import Optimizer, RunSettings
from lit_llm.plan.speed import Work, cpu_seconds, work_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from plan_accuracy import fit_speeds

sys.path.pop()  # benchmarks/clean.py would hide tests/clean

SHAPES = [
    (4, 256, 128, 1000),
    (2, 512, 256, 2000),
    (8, 128, 128, 500),
    (3, 256, 512, 30000),
    (6, 384, 64, 8000),
    (2, 64, 1024, 300),
    (5, 320, 256, 4096),
]


def settings(layers: int, width: int, length: int, vocabulary: int) -> RunSettings:
    return RunSettings(
        GPTConfig(n_layer=layers, n_head=4, n_embd=width, block_size=length, vocab_size=vocabulary),
        Optimizer("AdamW", fused=True),
        1,
        4,
    )


def test_true_speeds_are_found_and_predict_another_shape():
    true = (1e-11, 2e-11, 3e-10, 5e-9, 4e-10, 2e-6)
    works = [work_of(settings(*shape), cuda=False) for shape in SHAPES]
    found = fit_speeds(works, [cpu_seconds(work, true) for work in works])
    other = work_of(settings(7, 200, 200, 12345), cuda=False)
    assert cpu_seconds(other, found) == pytest.approx(cpu_seconds(other, true), rel=1e-3)


def test_no_speed_is_negative_although_the_best_fit_would_be():
    works = [Work(flops, 0, 0, 0, 0, 0, 0, 0, 0, 0, kernels=1.0) for flops in (1.0, 2.0, 3.0)]
    found = fit_speeds(works, [0.9, 1.9, 2.9])  # t = matmul - 0.1
    assert min(found) >= 0 and len(found) == 6
    assert cpu_seconds(works[1], found) == pytest.approx(1.9, rel=0.1)


def test_work_grows_as_it_should():
    one, two = (work_of(settings(*shape), cuda=False) for shape in ((4, 256, 128, 1000), (4, 256, 256, 1000)))
    assert two.body + two.head == 2 * (one.body + one.head)  # twice the tokens through the same matrices
    assert two.attention == 4 * one.attention  # attention is quadratic
    assert two.optimizer == one.optimizer  # the optimizer does not see the tokens

"""The loss with a sharded output matrix in 2 and 4 processes, compared with the formulas in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launch import run_ranks
from torch import Tensor
from vocabulary_parallel_script import CASES, SHARD, Case, inputs, run, teacher

from lit_llm.models import chunked_loss as loss_module

SCRIPT = Path(__file__).with_name("vocabulary_parallel_script.py")
EXACT = {name: case for name, case in CASES.items() if case.dtype == torch.float64}
ROUNDED = {name: case for name, case in CASES.items() if name not in EXACT}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, request.param, tmp_path_factory.mktemp("loss"))


def exact(case: Case, ranks: int) -> dict[str, Tensor]:
    """The formulas for the whole matrix without padding, with autograd in float64."""
    hidden, weight, targets = inputs(case, ranks)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    kept = targets != -100
    z = hidden[kept] @ weight[: case.vocab_size(ranks)].T
    if case.softcap is not None:
        z = case.softcap * torch.tanh(z / case.softcap)
    log_z = z.exp().sum(1).log()
    nll = (log_z - z[torch.arange(len(z)), targets[kept]]).sum()
    loss = nll + case.z_loss * log_z.square().sum()
    if case.teacher is not None:
        temperature, (ids, logp) = case.teacher[1], (each[kept] for each in teacher(case, ranks))
        q, p, ids = F.softmax(z / temperature, dim=1), logp.exp(), ids.long()
        kl = (p * (p.log() - q.gather(1, ids).log())).sum()
        if case.teacher[0]:  # the class of all other ids
            p_rest, q_rest = 1 - p.sum(1), (q * torch.ones_like(q).scatter(1, ids, 0)).sum(1)
            kl = kl + (p_rest * (p_rest / q_rest).log()).sum()
        loss = 0.7 * nll + 0.3 * temperature**2 * kl
    grad_hidden, grad_weight = torch.autograd.grad(loss * 0.37, (hidden, weight))
    return {"loss": loss.detach(), "nll": nll.detach(), "count": kept.sum(), "hidden": grad_hidden, "weight": grad_weight}


def assembled(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Combine the ranks: sum of partial gradients of the hidden states, concatenated rows of the matrix."""
    return {
        **{name: results[0][name] for name in ("loss", "nll", "count")},
        "hidden": sum(each["hidden"].double() for each in results),
        "weight": torch.cat([each["weight"] for each in results]),
    }


@pytest.mark.parametrize("name", CASES)
def test_sums_are_the_same_bits_on_all_ranks(reports: list[dict[str, Any]], name: str) -> None:
    for each in reports:
        for value in ("loss", "nll", "count"):
            assert torch.equal(each[name][value], reports[0][name][value])


@pytest.mark.parametrize("name", EXACT)
def test_float64_values_and_gradients_follow_the_formulas(reports: list[dict[str, Any]], name: str) -> None:
    case, results = EXACT[name], [each[name] for each in reports]
    expected = exact(case, len(reports))
    if case.frozen:
        evaluated = case.frozen in ("no_grad", "inference_mode")
        for gradient in ("hidden", "weight"):
            if evaluated or case.frozen == gradient:
                assert all(each[gradient] is None for each in results)
                for each in results:
                    each[gradient] = torch.zeros(case.shard if gradient == "weight" else case.rows, case.width).double()
                expected[gradient] = torch.zeros_like(expected[gradient])
    found = assembled(results)
    for value, correct in expected.items():
        torch.testing.assert_close(found[value], correct, rtol=1e-12, atol=1e-12)
    padding = case.shard * len(reports) - case.missing
    assert torch.equal(found["weight"][padding:], torch.zeros(case.missing, case.width).double())  # exactly
    assert expected["count"] > 0 or found["loss"] == found["nll"] == found["weight"].norm() == found["hidden"].norm() == 0


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_values_and_gradients_are_as_close_as_those_of_one_process(
    reports: list[dict[str, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "SOFTMAX_NUMEL", loss_module.SOFTMAX_NUMEL)  # `run` sets it
    case, ranks = ROUNDED[name], len(reports)
    correct = exact(case, ranks)

    def errors(found: dict[str, Tensor]) -> list[float]:
        names = ("loss", "nll", "hidden", "weight")
        return [float((found[key].double() - correct[key]).norm() / correct[key].norm()) for key in names]

    alone = errors(run(case, *inputs(case, ranks), ranks, None))
    found = assembled([each[name] for each in reports])
    assert found["loss"].dtype == torch.float32 and found["weight"].dtype == case.dtype
    bf16 = case.autocast or case.dtype == torch.bfloat16
    floor, ceiling = (2e-4, 2e-2) if bf16 else (3e-7, 1e-6)
    together = errors(found)
    assert all(ours < min(1.3 * theirs + floor, ceiling) for ours, theirs in zip(together, alone, strict=True)), (
        together,
        alone,
    )


def test_one_gather_for_each_block_of_the_softmax(reports: list[dict[str, Any]]) -> None:
    for each in reports:
        assert each["plain"]["gathers"] == 3 * 2 + 1  # 13 rows in chunks of 4, in blocks of 3 and 1
        assert each["full"]["gathers"] == 5  # 13 rows in blocks of 3
        assert each["one-chunk-of-one-block"]["gathers"] == each["one-row"]["gathers"] == 1


def test_sums_of_each_row_are_those_of_the_whole_matrix_and_the_same_bits_on_all_ranks(reports: list[dict[str, Any]]) -> None:
    hidden, weight, targets = inputs(Case(), len(reports))
    z = (hidden @ weight[: Case().vocab_size(len(reports))].T)[:12]
    each = F.cross_entropy(z, targets[:12], reduction="none").view(3, 4)
    for found in reports:
        for (count, row_nll, row_count), first in zip(found["by_row"], reports[0]["by_row"], strict=True):
            assert torch.equal(row_nll, first[1])
            torch.testing.assert_close(row_nll, each.sum(dim=1), rtol=1e-12, atol=1e-12)
            assert row_count.tolist() == (targets[:12].view(3, 4) != -100).sum(dim=1).tolist() and count == row_count.sum()


def test_a_confident_prediction_keeps_its_small_loss_and_gradient(reports: list[dict[str, Any]]) -> None:
    # Logits 1009 and 1000: in float32 a logsumexp of 1009.0001 would be 50 % off here, p - 1 a part in 1000.
    others = len(reports) - 1
    wrong = math.exp(-9) / (1 + others * math.exp(-9))
    gradient = sum(each["confident"]["hidden"] for each in reports)[0].tolist()
    nll = float(reports[0]["confident"]["nll"])
    assert nll == pytest.approx(math.log1p(others * math.exp(-9)), rel=1e-3)
    assert gradient == pytest.approx([-others * wrong if i == 1 else wrong for i in range(len(reports))], rel=1e-3)
    assert gradient[1] == pytest.approx(math.expm1(-nll), rel=1e-6)  # p - 1 of a p that was rounded is 2e-4 off


def test_a_target_outside_the_vocabulary_is_an_error_on_every_rank_and_no_rank_hangs(reports: list[dict[str, Any]]) -> None:
    size = Case().vocab_size(len(reports))
    expected = [
        f"Target {target} is out of bounds: the vocabulary has {size} tokens." for target in (size, SHARD * len(reports), -1)
    ]
    for each in reports:
        assert each["messages"] == expected * 2
        for value in ("loss", "hidden", "weight"):
            assert torch.equal(each["after"][value], each["plain"][value])

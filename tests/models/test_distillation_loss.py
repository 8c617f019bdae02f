"""The loss of distillation: against `F.kl_div`, and against its formula by autograd in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lit_llm.models.distillation_loss import TeacherLogits
from lit_llm.models.loss import LossSums, chunked_cross_entropy, cross_entropy

V, PADDED, WIDTH = 11, 16, 5


def inputs(k: int, temperature: float, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Two rows of 7 targets, of which some do not count, and the top k of a random teacher."""
    draw = torch.Generator().manual_seed(seed)
    teacher = F.log_softmax(3 * torch.randn(2, 7, V, generator=draw, dtype=torch.float64) / temperature, dim=-1)
    logp, ids = teacher.topk(k)
    targets = torch.randint(V, (2, 7), generator=draw)
    targets[:, ::3] = -100
    return {
        "hidden": torch.randn(2, 7, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(),
        "weight": torch.randn(PADDED, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(),
        "targets": targets,
        "teacher_ids": ids.int(),
        "teacher_logp": logp,
    }


def distillation(
    *, teacher_ids: torch.Tensor, teacher_logp: torch.Tensor, temperature: float, teacher_weight: float, **rest
) -> LossSums:
    rest["chunk_size"] = rest.get("chunk_size") or 100
    return chunked_cross_entropy(**rest, teacher=TeacherLogits(teacher_ids, teacher_logp, temperature, teacher_weight))


def student(given: dict[str, torch.Tensor], softcap: float | None) -> torch.Tensor:
    """(counted, V) logits, differentiable."""
    z = (given["hidden"] @ given["weight"][:V].T)[given["targets"] >= 0]
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def gradients(loss: torch.Tensor, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(2.5 * loss, (given["hidden"], given["weight"]))  # scaled by what comes from above


CASES = pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
SOFTCAP = pytest.mark.parametrize("softcap", [None, 4.0])
CHUNKS = pytest.mark.parametrize("chunk_size", [None, 4])


@CASES
@SOFTCAP
@CHUNKS
def test_the_whole_vocabulary_is_torchs_kl_div(temperature, softcap, chunk_size):
    given = inputs(V, temperature)
    rest = {"vocab_size": V, "softcap": softcap, "chunk_size": chunk_size, "temperature": temperature}
    ours = distillation(**given, **rest, teacher_weight=1.0)
    logp = torch.zeros(2, 7, V, dtype=torch.float64).scatter(2, given["teacher_ids"].long(), given["teacher_logp"])
    z, counted = student(given, softcap), given["targets"] >= 0
    kl = F.kl_div(F.log_softmax(z / temperature, -1), logp[counted], reduction="sum", log_target=True)
    assert abs((ours.loss - temperature**2 * kl).item()) <= 1e-10 and ours.count == counted.sum()
    assert ours.means.flatten().tolist() == pytest.approx([kl.item(), counted.sum().item()], abs=1e-10)
    assert ours.nll.item() == pytest.approx(F.cross_entropy(z, given["targets"][counted], reduction="sum").item(), abs=1e-10)
    for found, expected in zip(gradients(ours.loss, given), gradients(temperature**2 * kl, given), strict=True):
        assert (found - expected).abs().max() <= 1e-10


@CASES
@SOFTCAP
@CHUNKS
@pytest.mark.parametrize("k", [1, 4, V - 1])
def test_the_top_k_and_the_class_of_the_rest_follow_the_formula(k, temperature, softcap, chunk_size):
    given = inputs(k, temperature, seed=k)
    rest = {"vocab_size": V, "softcap": softcap, "temperature": temperature}
    ours = distillation(**given, **rest, chunk_size=chunk_size, teacher_weight=0.3)
    z, counted = student(given, softcap), given["targets"] >= 0
    q, p = F.softmax(z / temperature, dim=-1), given["teacher_logp"][counted].exp()
    ids = given["teacher_ids"][counted].long()
    top, p_rest = q.gather(1, ids), 1 - p.sum(1)
    q_rest = (q * torch.ones_like(q).scatter(1, ids, 0)).sum(1)
    kl = (p * (p / top).log()).sum() + (p_rest * (p_rest / q_rest).log()).sum()
    expected = 0.7 * F.cross_entropy(z, given["targets"][counted], reduction="sum") + 0.3 * temperature**2 * kl
    assert abs((ours.loss - expected).item()) <= 1e-10 and abs(ours.means[0, 0] - kl).item() <= 1e-10
    for found, formula in zip(gradients(ours.loss, given), gradients(expected, given), strict=True):
        assert (found - formula).abs().max() <= 1e-10


def test_a_weight_of_0_and_positions_without_a_teacher_leave_cross_entropy():
    given = inputs(3, 2.0)
    rest = {"vocab_size": V, "temperature": 2.0, "by_row": True}
    tensors = [given[name] for name in ("hidden", "weight", "targets")]
    nothing = distillation(**given, **rest, teacher_weight=0.0)
    given |= {"teacher_logp": torch.zeros(2, 7, 3), "teacher_ids": torch.zeros(2, 7, 3, dtype=torch.int32)}
    unknown = distillation(**given, **rest, teacher_weight=0.4)
    assert unknown.means.tolist() == [[0, 0]]
    for sums, share in ((nothing, 1.0), (unknown, 0.6)):
        plain = cross_entropy(*tensors, vocab_size=V, by_row=True)
        torch.testing.assert_close(sums.loss, share * plain.loss)
        torch.testing.assert_close(sums.row_nll, plain.row_nll)
        for found, expected in zip(gradients(sums.loss, given), gradients(share * plain.loss, given), strict=True):
            torch.testing.assert_close(found, expected)


def test_rounded_and_extreme_values_stay_finite():
    """float16 probabilities may add up to more than 1, and a student may be certain of what the teacher excludes."""
    given = inputs(V, 1.0, dtype=torch.float32)
    given["teacher_logp"] = given["teacher_logp"].half()
    with torch.no_grad():
        given["hidden"].mul_(1e3)
    for k in (2, V):
        cut = given | {name: given[name][..., :k] for name in ("teacher_ids", "teacher_logp")}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=k == 2):
            sums = distillation(**cut, vocab_size=V, temperature=1.0, teacher_weight=0.5, chunk_size=3)
        assert sums.loss.isfinite() and sums.means[0, 0] >= 0
        assert all(each.isfinite().all() for each in gradients(sums.loss, cut))

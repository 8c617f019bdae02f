"""lit_llm.models.loss against F.cross_entropy, autograd in float64, and the worked values of TRAINING-MATH."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_llm.models import chunked_loss as loss_module
from lit_llm.models.loss import LossSums, chunked_cross_entropy, cross_entropy

BOTH = pytest.mark.parametrize("loss_function", [cross_entropy, chunked_cross_entropy])


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor]:
    """(loss, nll) sums written down as the formulas are, through autograd, row by row over counted rows only."""
    loss, nll = hidden.new_zeros(()), hidden.new_zeros(())
    for h, target in zip(hidden.flatten(0, -2), targets.flatten().tolist(), strict=True):
        if target == -100:
            continue
        z = torch.stack([(h * weight[token]).sum() for token in range(vocab_size)])
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        log_z = z.exp().sum().log()
        nll = nll + log_z - z[target]
        loss = loss + log_z - z[target] + z_loss * log_z**2
    return loss, nll


def inputs(
    rows: int, width: int, vocab_size: int, padded: int, dtype: torch.dtype = torch.float64, ignored: float = 0.25
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(padded, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = -100
    return hidden, weight, targets


def gradients(loss: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    # A factor stands for what follows the loss in real life (1/token count, loss scale): backward must multiply by it.
    return torch.autograd.grad(loss * 0.37, wanted)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize(
    ("rows", "width", "padded", "chunk_size"),
    [(12, 8, 16, 4), (13, 7, 11, 4), (3, 5, 13, 1024), (1, 1, 11, 1), (9, 3, 16, 1)],
    ids=["even", "ragged-last-chunk", "fewer-rows-than-a-chunk", "one-row", "chunks-of-one"],
)
def test_values_and_gradients_equal_the_formulas_in_float64(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    width: int,
    padded: int,
    chunk_size: int,
    softcap: float | None,
    z_loss: float,
) -> None:
    monkeypatch.setattr(loss_module, "SOFTMAX_NUMEL", 3 * padded)  # three rows: a chunk of four ends in a block of one
    hidden, weight, targets = inputs(rows, width, 11, padded, ignored=0.25 if rows > 1 else 0.0)
    options: dict[str, Any] = {"vocab_size": 11, "softcap": softcap, "z_loss": z_loss}
    expected_loss, expected_nll = reference(hidden, weight, targets, **options)
    expected = gradients(expected_loss, hidden, weight)

    for sums in (
        cross_entropy(hidden, weight, targets, **options),
        chunked_cross_entropy(hidden, weight, targets, **options, chunk_size=chunk_size),
    ):
        torch.testing.assert_close(sums.loss, expected_loss)
        torch.testing.assert_close(sums.nll, expected_nll.detach())
        assert sums.count.dtype == torch.int64 and sums.count == (targets != -100).sum()
        for actual, correct in zip(gradients(sums.loss, hidden, weight), expected, strict=True):
            torch.testing.assert_close(actual, correct)


@BOTH
def test_logits_near_1000_do_not_overflow(loss_function: Any) -> None:
    z = torch.tensor([[1000.0, 999.0, -1000.0], [-1000.0, 1000.0, 998.0]], requires_grad=True)
    sums = loss_function(z, torch.eye(3), torch.tensor([0, 2]), vocab_size=3)
    # ln(1 + e^-1) + (2 + ln(1 + e^-2)): only differences of logits matter
    assert float(sums.nll) == pytest.approx(math.log1p(math.exp(-1)) + 2 + math.log1p(math.exp(-2)), rel=1e-6)
    (grad,) = torch.autograd.grad(sums.loss, z)
    first, second = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    expected = torch.tensor([[first - 1, 1 - first, 0], [0, second, -second]])
    torch.testing.assert_close(grad, expected)


def test_a_confident_prediction_keeps_its_small_gradient_in_bf16() -> None:
    # p = 1 - 1e-3: softmax rounded to bf16 is exactly 1, and 1 - 1 would teach nothing.
    gap = math.log(999)
    hidden = torch.tensor([[gap, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    sums = chunked_cross_entropy(hidden, torch.eye(2, dtype=torch.bfloat16), torch.tensor([0]), vocab_size=2)
    (grad,) = torch.autograd.grad(sums.loss, hidden)
    p_wrong = 1 / (1 + math.exp(hidden[0, 0].item()))
    assert grad[0].tolist() == pytest.approx([-p_wrong, p_wrong], rel=2**-8)


@BOTH
@pytest.mark.parametrize("target", [10, 15, -1], ids=["padded-id", "last-padded-id", "negative"])
def test_a_target_outside_the_vocabulary_is_an_error(loss_function: Any, target: int) -> None:
    hidden, weight, targets = inputs(4, 4, 10, 16)
    targets[2] = target
    with pytest.raises(IndexError, match=rf"Target {target} is out of bounds"):
        loss_function(hidden, weight, targets, vocab_size=10)


@BOTH
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_sums_of_each_row_follow_the_formulas_and_change_no_gradient(loss_function: Any, z_loss: float) -> None:
    hidden, weight, targets = inputs(12, 4, 10, 16, ignored=0.3)
    targets[4:8] = -100  # a row without targets
    shaped, options = targets.view(3, 4), {"vocab_size": 10, "softcap": 3.0, "z_loss": z_loss}
    chunks = {"chunk_size": 5} if loss_function is chunked_cross_entropy else {}  # chunks end within rows
    sums = loss_function(hidden.view(3, 4, 4), weight, shaped, by_row=True, **options, **chunks)
    expected = [reference(h, weight, t, **options)[1] for h, t in zip(hidden.view(3, 4, 4), shaped, strict=True)]
    torch.testing.assert_close(sums.row_nll, torch.stack(expected).detach())
    assert sums.row_count.tolist() == (shaped != -100).sum(dim=1).tolist()
    assert not sums.row_nll.requires_grad
    without = loss_function(hidden, weight, targets, **options, **chunks)
    assert without.row_nll is None and without.row_count is None
    torch.testing.assert_close(sums[:3], without[:3])
    for ours, theirs in zip(gradients(sums.loss, hidden, weight), gradients(without.loss, hidden, weight), strict=True):
        assert torch.equal(ours, theirs)


def close(actual: LossSums, exact: LossSums, grads: tuple[Tensor, ...], exact_grads: tuple[Tensor, ...]) -> list[float]:
    """Relative errors of the loss and of each gradient (Frobenius)."""
    errors = [((actual.loss.double() - exact.loss).abs() / exact.loss).item()]
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        errors.append(float((grad.double() - exact_grad).norm() / exact_grad.norm()))
    return errors


@pytest.mark.parametrize("options", [{}, {"softcap": 8.0, "z_loss": 1e-2}], ids=["plain", "softcap-z-loss"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["autocast", "bf16-weights"])
def test_bf16_is_as_close_to_float64_as_full_logits_in_bf16_are(stored: torch.dtype, options: dict[str, Any]) -> None:
    hidden, weight, targets = inputs(96, 32, 300, 320, stored)
    exact_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = cross_entropy(*exact_inputs, targets, vocab_size=300, **options)
    exact_grads = torch.autograd.grad(exact.loss, exact_inputs)

    found = []
    for loss_function in (cross_entropy, chunked_cross_entropy):
        chunks = {"chunk_size": 16} if loss_function is chunked_cross_entropy else {}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=stored == torch.float32):
            sums = loss_function(hidden, weight, targets, vocab_size=300, **options, **chunks)
        assert sums.loss.dtype == sums.nll.dtype == torch.float32
        grads = torch.autograd.grad(sums.loss, (hidden, weight))
        assert [grad.dtype for grad in grads] == [stored, stored]
        found.append(close(sums, exact, grads, exact_grads))
    full, chunked = found
    # bf16 has 8 bits of mantissa: a few parts in a thousand. Ours may be worse than torch's by no more than noise.
    assert max(full) < 2e-2
    assert all(ours < 1.3 * theirs + 1e-4 for ours, theirs in zip(chunked, full, strict=True)), found


def test_weight_gradient_does_not_lose_precision_with_the_number_of_chunks() -> None:
    hidden, weight, targets = inputs(512, 16, 64, 64, torch.bfloat16, ignored=0.0)
    exact_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = cross_entropy(*exact_inputs, targets, vocab_size=64)
    (exact_grad,) = torch.autograd.grad(exact.loss, exact_inputs[1:])

    def error(chunk_size: int) -> float:
        sums = chunked_cross_entropy(hidden, weight, targets, vocab_size=64, chunk_size=chunk_size)
        (grad,) = torch.autograd.grad(sums.loss, weight)
        return float((grad.double() - exact_grad).norm() / exact_grad.norm())

    assert error(4) < 1.2 * error(512)  # 128 sums in bf16 would be several times off


def test_a_second_backward_says_so_instead_of_scaling_twice() -> None:
    hidden, weight, targets = inputs(8, 4, 10, 16)
    sums = chunked_cross_entropy(hidden, weight, targets, vocab_size=10)
    torch.autograd.grad(sums.loss, (hidden, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        torch.autograd.grad(sums.loss, (hidden, weight))

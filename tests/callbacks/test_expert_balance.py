"""ExpertBalance with a module that is not lit_llm's."""

import pytest
import torch
from foreign import Foreign, fit

from lit_llm.callbacks import ExpertBalance, GradientNorm, SpikeGuard
from lit_llm.callbacks.errors import UserError

COUNTS = [[[6.0, 2.0, 4.0], [0.0, 12.0, 0.0]], [[4.0, 4.0, 4.0], [1.0, 2.0, 9.0]], [[0.0, 0.0, 0.0], [5.0, 4.0, 3.0]]]
"""(L, E) of three steps."""


class Counting(Foreign):
    """Says these counts. Its loss is not finite in the steps `broken`."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("biases", torch.zeros(2, 3))
        self.expert_biases = list(self.biases)
        self.broken = broken

    @property
    def expert_counts(self) -> torch.Tensor:
        return torch.tensor(COUNTS[self.trainer.global_step])

    @property
    def router_means(self) -> dict[str, torch.Tensor]:
        return {"entropy": torch.tensor([1.0, 0.5])}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.global_step + 1 in self.broken else loss


def moved(steps: list[int], rate: float) -> list[list[float]]:
    """What the sign of the mean minus the count adds up to, by hand."""
    signs = {1: [[-1, 1, 0], [1, -1, 1]], 2: [[0, 0, 0], [1, 1, -1]], 3: [[0, 0, 0], [-1, 0, 1]]}
    return [[rate * sum(signs[step][layer][e] for step in steps) for e in range(3)] for layer in range(2)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_biases_move_once_a_step_against_the_loads(tmp_path, accumulate):
    module = Counting()
    rows = fit([ExpertBalance(0.5)], tmp_path, module=module, steps=3, accumulate_grad_batches=accumulate)[2]
    assert module.biases.tolist() == moved([1, 2, 3], 0.5)
    load = {1: 12 / 4, 2: 9 / 4, 3: 5 / 4}
    dead = {1: 2, 2: 0, 3: 3}
    assert {step: rows[step]["experts/load"] for step in rows} == pytest.approx(load)
    assert {step: rows[step]["experts/dead"] for step in rows} == dead
    assert [rows[step]["experts/bias"] for step in (1, 2, 3)] == pytest.approx([2 / 3, 2 / 3, 0.5])  # by hand
    assert rows[1]["experts/entropy"] == 0.75


@pytest.mark.parametrize("guard", [SpikeGuard, GradientNorm])
def test_a_skipped_step_moves_nothing(tmp_path, guard):
    module = Counting(broken=(2,))
    fit([guard(), ExpertBalance(0.5)], tmp_path, module=module, steps=3)
    assert module.biases.tolist() == moved([1] if guard is GradientNorm else [1, 3], 0.5)  # without a guard, weights are NaN


def test_rate_zero_only_logs(tmp_path):
    module = Counting()
    rows = fit([ExpertBalance(0.0)], tmp_path, module=module, steps=2)[2]
    assert not module.biases.any() and rows[1]["experts/load"] == 3


def test_a_module_without_experts_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"Foreign has none: remove ExpertBalance"):
        fit([ExpertBalance()], tmp_path, steps=1)

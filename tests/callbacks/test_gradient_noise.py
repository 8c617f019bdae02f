"""The gradient noise scale, against a linear model with a known covariance, the gradients of single samples, and whole runs."""

import math

import pytest
import torch
from foreign import BATCH, Batches, Foreign, fit, run_ranks
from torch import nn
from torch.utils.data import DataLoader

from lit_llm.callbacks import GradientNoise, GradientNorm
from lit_llm.callbacks.errors import UserError
from lit_llm.callbacks.gradient_noise import noise_and_signal
from lit_llm.distributed.mesh_strategy import loss_scaling


def test_the_estimates_are_unbiased_for_a_known_covariance():
    """Gradients drawn from N(g, C) in float64: |g|² = 5.25, tr C = 12."""
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64), torch.tensor([2.0, 2.0, 2.0], dtype=torch.float64)
    each = mean + std * torch.randn(40_000, 8, 3, generator=generator, dtype=torch.float64)  # steps of 8 samples
    small, big = each[:, :2].mean(1).square().sum(-1), each.mean(1).square().sum(-1)
    found = torch.stack([noise_and_signal(a, b, 2, 8) for a, b in zip(small[:4000], big[:4000], strict=True)]).mean(0)
    assert found.tolist() == pytest.approx([12.0, 5.25], rel=0.1)
    # The same in closed form: E|G_b|² = 5.25 + 12 / b.
    exact = noise_and_signal(torch.tensor(5.25 + 12 / 2), torch.tensor(5.25 + 12 / 8), 2, 8)
    assert exact.tolist() == pytest.approx([12.0, 5.25], rel=1e-5)


class Linear(Foreign):
    """Mean of w · x over a micro-batch, so the gradient of a sample is x. Rate 0: every step has the same expected gradient."""

    def __init__(self, rows, micro):
        super().__init__()
        self.w, self.rows, self.micro = nn.Parameter(torch.zeros(rows.size(1), dtype=torch.float64)), rows, micro

    def training_step(self, batch, batch_idx):
        return (batch @ self.w).mean()

    def configure_optimizers(self):
        return torch.optim.SGD([self.w], lr=0.0)

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=self.micro)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_callback_logs_the_averages_of_the_steps_whatever_the_clipping(tmp_path, clip):
    generator = torch.Generator().manual_seed(1)
    rows = 1 + torch.randn(4 * 3 * 2, 5, generator=generator, dtype=torch.float64)  # 4 steps of 3 micro-batches of 2
    noise = GradientNoise(every_n_steps=1, decay=0.9)
    order = [GradientNorm(clip), noise] if clip else [noise, GradientNorm(clip)]
    found = fit(order, tmp_path, module=Linear(rows, 2), steps=4, every=1, accumulate_grad_batches=3)[2]
    steps = rows.view(4, 3, 2, 5)
    trace = square = weight = 0.0
    for step, sample in enumerate(steps, 1):
        small, big = sample[0].mean(0).square().sum().item(), sample.mean((0, 1)).square().sum().item()
        trace = 0.9 * trace + 0.1 * (small - big) / (1 / 2 - 1 / 6)
        square = 0.9 * square + 0.1 * (6 * big - 2 * small) / (6 - 2)
        weight = 0.9 * weight + 0.1
        row = {name.partition("/")[2]: value for name, value in found[step].items() if name.startswith("gradient_noise/")}
        expected = {"variance": trace / weight, "squared_norm": square / weight}
        if square > 0:
            expected["scale_samples"] = trace / square
        assert row == pytest.approx(expected, rel=1e-9)
    restored = GradientNoise()
    restored.load_state_dict(noise.state_dict())
    assert torch.equal(restored.sums, noise.sums)
    assert noise.sums.tolist() == pytest.approx([trace, square, weight], rel=1e-9)


def test_neither_a_window_that_the_epoch_cuts_short_nor_a_first_micro_batch_without_targets_is_sampled(tmp_path):
    class Empty(Linear):
        def first_gradient_scale(self):
            return math.inf

    rows = torch.randn(5 * 2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for kind, count in ((Linear, 10), (Linear, 6), (Empty, 10)):  # 3 micro-batches of 2, then 2 or none
        noise = GradientNoise(every_n_steps=1, decay=0.9)
        fit([noise], tmp_path, module=kind(rows[:count], 2), steps=-(-count // 6), accumulate_grad_batches=3)
        found.append(noise.sums.tolist())
    assert found[0] == found[1] != [0.0] * 3 == found[2]


def test_a_gradient_that_is_not_finite_is_left_out():
    noise = GradientNoise()
    noise.add(torch.tensor([4.0, 2.0]))
    before = noise.sums.clone()
    noise.add(torch.tensor([math.nan, 2.0]))
    assert torch.equal(noise.sums, before)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (GradientNoise, {}, r"Trainer\(accumulate_grad_batches\)"),
        (GradientNoise, {"accumulate_grad_batches": 2, "plugins": [loss_scaling("cpu")]}, "bf16-mixed"),
    ],
)
def test_what_has_no_smaller_batch_is_refused(tmp_path, make, options, said):
    with pytest.raises(UserError, match=said):
        fit([make()], tmp_path, steps=2, **options)


DDP = """
from lit_llm.callbacks import GradientNoise, GradientNorm

def run(strategy, accumulate):
    trainer = make_trainer([GradientNorm(0.01), GradientNoise(1, 0.0)], OUT, steps=1, strategy=strategy, devices=2,
                           use_distributed_sampler=False, accumulate_grad_batches=accumulate)
    trainer.fit(Foreign(steps=1))
    return trainer

trainer = run("ddp", 2)
refused = ""
try:
    run("ddp", 1)
except ValueError as error:
    refused = str(error)
report(trainer, row=trainer.logger.rows[1], refused=refused)
"""


@pytest.mark.slow
def test_the_small_batches_of_two_ranks_are_their_own(tmp_path):
    """Both ranks count: |G_small|² is the mean over them, and the big batch is that of all ranks."""
    model = Foreign(steps=1).double()

    def gradient(numbers):
        model.zero_grad()
        sum(model.loss(Batches(10)[i]) / len(numbers) for i in numbers).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).square().sum()

    small, big = (gradient([0]) + gradient([1])) / 2, gradient([0, 1, 2, 3])
    trace, square = noise_and_signal(small, big, BATCH, 4 * BATCH).tolist()
    for rank, report in enumerate(run_ranks(DDP, tmp_path)):
        if rank == 0:
            assert report["row"]["gradient_noise/variance"] == pytest.approx(trace, rel=1e-5)
            assert report["row"]["gradient_noise/squared_norm"] == pytest.approx(square, rel=1e-4)
        assert "one micro-batch" in report["refused"]

"""Measures the gradient noise scale in the first steps of a recipe, and computes a batch size from it, for `find-batch`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_llm.callbacks import GradientNoise
from lit_llm.callbacks.gradient_noise import noise_and_signal
from lit_llm.callbacks.gradient_norm_and_clipping import total_norm
from lit_llm.commands.short_runs import ShortRuns
from lit_llm.core import batch_sizes
from lit_llm.core._torch import foreach_add_
from lit_llm.core.errors import UserError

LEAST_STEPS = 100


class _FrozenNoise(GradientNoise):
    """Callback for two gradient norms at fixed weights: of a step's first micro-batch, and of the mean gradient of all steps.

    This is far more exact than in training, where both norms must come from the same step. The class is private, so that no
    recipe can name it. `first`: the number of optimizer steps before the measurement begins.
    """

    def __init__(self, first: int) -> None:
        super().__init__(every_n_steps=1)
        self.first = first
        self.small, self.steps, self.samples = 0.0, 0, (0, 0)
        self._total: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        small, samples, count = self.take_first()
        if trainer.global_step < self.first or small is None or not small.isfinite():  # no target in the first micro-batch
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.steps == 0:
            self._total = [torch.zeros_like(gradient) for gradient in gradients]
        foreach_add_(self._total, gradients)
        self.small, self.steps = self.small + float(small), self.steps + 1
        self.samples = (samples, samples * count)

    def noise(self) -> Noise:
        """The measured noise. If no first micro-batch had a target, both estimates are 0, which adds nothing to a sum."""
        if not self.steps:
            return Noise(0.0, 0.0)
        big = (total_norm(self._total).double() / self.steps).square().cpu()
        small = torch.tensor(self.small / self.steps, dtype=torch.float64)
        trace, square = noise_and_signal(small, big, self.samples[0], self.samples[1] * self.steps).tolist()
        return Noise(trace, square)


@dataclass(frozen=True)
class Noise:
    """Record of two estimates from gradients, averaged over steps. Their ratio is the noise scale, in sequences.

    Attributes:
        trace: tr(Σ), where Σ is the covariance of the gradient of one sequence.
        square: |G|², where G is the expected gradient.
    """

    trace: float
    square: float

    @property
    def scale(self) -> float:
        """The noise scale tr(Σ)/|G|²; infinite if the estimate of |G|² is not above 0, because noise hides the gradient."""
        return self.trace / self.square if self.square > 0 else math.inf


@dataclass(frozen=True)
class FoundBatch:
    """Record of the result of `find_batch`. Batches are in sequences.

    Attributes:
        noise: the two estimates of `Noise`, each averaged over the seeds.
        by_seed: the estimates of each seed.
        batch: the advised global batch.
        micro_batch: the recipe's micro-batch, or a smaller one if the batch is smaller.
        steps: optimizer steps of each seed: the first half trains, the second measures.
    """

    noise: Noise
    by_seed: list[Noise]
    batch: int
    micro_batch: int
    steps: int


def mean_noise(noises: list[Noise]) -> Noise:
    """Return the mean of each of the two estimates over `noises`, one per seed. A mean of ratios would be biased."""
    return Noise(sum(noise.trace for noise in noises) / len(noises), sum(noise.square for noise in noises) / len(noises))


def measuring_micro_batch(batch: int, micro_batch: int) -> int:
    """Return the micro-batch for measuring, in sequences: the largest divisor of `batch` that exceeds neither `micro_batch`,
    the recipe's, nor a quarter of `batch`; at least 1.
    """
    return batch_sizes.micro_batch(batch, min(micro_batch, max(1, batch // 4)), 1)


def nearest_batch(scale: float, micro_batch: int, devices: int) -> tuple[int, int]:
    """Return (global batch nearest to a noise scale, its micro-batch), in sequences, with whole micro-batches on each device.

    The micro-batch is `micro_batch`, the recipe's, unless the batch is smaller than one such micro-batch on each device.
    """
    unit = micro_batch * devices
    if scale >= unit:
        return max(1, round(scale / unit)) * unit, micro_batch
    each = max(1, round(scale / devices))
    return each * devices, each


def find_batch(runs: ShortRuns, *, seeds: int, steps: int | None, say: Callable[[str], None] = lambda text: None) -> FoundBatch:
    """Return noise scale and advised batch. For each seed, train like `fit` for half of `steps`, then measure at fixed weights.

    Args:
        steps: optimizer steps of each seed. None: a tenth of the run, at least `LEAST_STEPS`.
        say: prints a line about each seed.

    Raises:
        UserError: the data module has no global_batch_size, or it is 1; a loss is not finite; the noise hides the gradient.
    """
    batch = getattr(runs.data, "global_batch_size", None)
    if batch is None:
        raise UserError(f"{type(runs.data).__name__} has no global_batch_size, so there is no batch to find (--data)")
    if batch < 2:
        raise UserError("a batch of 1 sequence has no smaller part to compare it with: raise it (--data.global_batch_size 8)")
    micro_batch = runs.data.micro_batch_size or max(1, batch // runs.devices)
    steps = runs.tenth(LEAST_STEPS) if steps is None else min(steps, runs.steps)
    runs.data_options = {"micro_batch_size": measuring_micro_batch(batch, micro_batch)}
    by_seed: list[Noise] = []
    for seed in range(seeds):
        recorder = _FrozenNoise(steps // 2)
        losses = runs.observe(steps, [recorder], seed=seed, frozen_after=steps // 2)
        if len(losses) < steps or not math.isfinite(losses[-1]):
            raise UserError("the loss is not finite with the recipe's rates: lower them first (find-lr)")
        by_seed.append(recorder.noise())
        scale = _said(by_seed[-1].scale)
        say(f"seed {seed}: {scale} sequences, tr(Σ) {by_seed[-1].trace:.3g}, |G|² {by_seed[-1].square:.3g}")
    noise = mean_noise(by_seed)
    if not math.isfinite(noise.scale) or noise.scale <= 0:
        raise UserError(
            f"the noise of {steps - steps // 2} batches of {batch} sequences hides the gradient: measure more steps "
            f"(--noise_steps {4 * steps}), or larger batches (--data.global_batch_size {4 * batch})"
        )
    advised, micro_batch = nearest_batch(noise.scale, micro_batch, runs.devices)
    return FoundBatch(noise, by_seed, advised, micro_batch, steps)


def _said(scale: float) -> str:
    return f"{scale:,.3g}" if math.isfinite(scale) else "more than measurable"

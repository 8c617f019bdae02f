"""The gradient noise scale: about how many samples a batch should have."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ._lightning import callback_of, is_logged, write_row
from ._torch import tensors_in
from .batch_ramp import BatchRamp
from .contracts import HasMicroBatches, ScalesFirstGradient, ScalesLoss, offered, offered_by_data
from .errors import UserError, setting, without
from .gradient_norm_and_clipping import GradientNorm, gradient_norm
from .ranges import STEPS, below, check_ranges, whole


def noise_and_signal(small: Tensor, big: Tensor, small_samples: int, big_samples: int) -> Tensor:
    """Unbiased estimates (2,) of tr(Σ) and |G|², from the squared gradient norms `small` and `big` of a small and a big batch.

    A batch of b samples has E|G_b|² = |G|² + tr(Σ)/b, where G is the mean and Σ the covariance of single samples' gradients.
    Two sizes give two equations (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1). An estimate can be negative.
    """
    trace = (small - big) / (1 / small_samples - 1 / big_samples)
    square = (big_samples * big - small_samples * small) / (big_samples - small_samples)
    return torch.stack([trace, square])


class GradientNoise(Callback):
    """Logs the simple gradient noise scale tr(Σ)/|G|², from the micro-batches of a step.

    Training with a batch of that size takes twice the least possible number of steps and twice the least possible number of
    samples (McCandlish et al. 2018). The scale grows while the loss falls. The theory is for SGD; for Adam the scale is right
    in order of magnitude.

    Logs at logged steps, where Σ is the covariance of one sample's gradient and G the mean gradient, as moving averages:
        `gradient_noise/scale_samples`: tr(Σ)/|G|² in samples, if |G|² is estimated above 0.
        `gradient_noise/scale_tokens`: tr(Σ)/|G|² in tokens, if a batch is integers (B, T).
        `gradient_noise/variance`: moving average of tr(Σ).
        `gradient_noise/squared_norm`: moving average of |G|².

    The small batch is the first micro-batch of a step on each rank, the big one is the whole step. The loss of a micro-batch
    must be the mean over its targets, unless the module has `first_gradient_scale` (`contracts.py`). A step is left out if this
    factor is NaN or infinite, because the micro-batch has no target.

    Contract:
        on_train_start: refuses settings in which no gradient of a smaller batch exists.
        on_after_backward: at sampled steps, computes the gradient norm after the first micro-batch.
        on_before_optimizer_step: at sampled steps, gets the step's gradient norm before clipping, from `GradientNorm` if there
            is one. The host synchronises at logged steps only. Several ranks reduce one number in a sampled step.
        State: the moving averages.
    Cost: one more gradient norm in a sampled step, which reads each gradient once.

    Args:
        every_n_steps: optimizer steps between two sampled steps.
        decay: weight of the past in the moving averages, for each sampled step.

    Raises:
        UserError: numbers out of range; only one micro-batch per step; fp16 loss scaling; a strategy other than DDP on
            several ranks, which keeps no gradient of one rank.
    """

    def __init__(
        self, every_n_steps: Annotated[int, whole(1, STEPS)] = 10, decay: Annotated[float, below(0, 1)] = 0.95
    ) -> None:
        check_ranges(GradientNoise, locals())
        self.every_n_steps, self.decay = every_n_steps, decay
        self.sums: Tensor | None = None  # (3,), on the device: of tr(Σ) and |G|², and of their weights
        self._micro_batches = 0  # of the current step, whose backward has ended
        self._small: Tensor | None = None
        self._shape = (1, 1)  # samples of a micro-batch, and tokens of a sample

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._micro_batches, self._small = 0, None  # an interrupted fit may have left a part of a step
        if trainer.accumulate_grad_batches < 2 and callback_of(trainer, BatchRamp) is None:
            sized = offered_by_data(trainer, HasMicroBatches)  # then accumulation follows from the sizes of the data
            where = setting(type(sized), "micro_batch_size") if sized else setting(Trainer, "accumulate_grad_batches")
            raise UserError(
                "GradientNoise compares the first micro-batch of a step with the whole step, but a step has one micro-batch: "
                f"accumulate several ({where}), or {without(GradientNoise)}."
            )
        if trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy):
            raise UserError(
                f"GradientNoise needs the gradient of one rank, which {type(trainer.strategy).__name__} does not keep: use "
                f"DDP ({setting(Trainer, 'strategy')}), or {without(GradientNoise)}."
            )
        if offered(trainer.precision_plugin, ScalesLoss):
            raise UserError(
                "GradientNoise does not work with the scaled gradients of 16-mixed: use bf16-mixed "
                f"({setting(Trainer, 'precision')}), or {without(GradientNoise)}."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._micro_batches == 0:
            self._shape = _shape(batch)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._micro_batches += 1
        is_sampled = trainer.global_step % self.every_n_steps == 0
        if self._micro_batches > 1 or not is_sampled or trainer.accumulate_grad_batches < 2:
            return
        own = offered(pl_module, ScalesFirstGradient)
        scale = trainer.accumulate_grad_batches if own is None else own.first_gradient_scale()
        self._small = _square(gradient_norm(trainer, trainer.optimizers[0]) * scale)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        small, samples, count = self.take_first()
        if small is not None and count == trainer.accumulate_grad_batches:  # an epoch may end before the step has all
            if trainer.world_size > 1:
                reduced = trainer.strategy.reduce(small, reduce_op="mean")
                assert isinstance(reduced, Tensor)
                small = reduced
            # A `GradientNorm` that comes first has computed it, and may have clipped the gradients since.
            norm = getattr(callback_of(trainer, GradientNorm), "latest_norm", None)
            big = _square(gradient_norm(trainer, optimizer) if norm is None else norm)
            self.add(noise_and_signal(small, big, samples, samples * count * trainer.world_size))
        step = trainer.global_step + 1
        if self.sums is not None and is_logged(trainer, step):
            trace, square, weight = self.sums.tolist()
            if weight:
                write_row(trainer, self._row(trace / weight, square / weight), step)

    def take_first(self) -> tuple[Tensor | None, int, int]:
        """Return the measurements of this step, and clear them: the next micro-batch counts as the first of another step.

        Returns:
            The squared norm of the first micro-batch's gradient (None: the step is not sampled), the number of samples in that
            micro-batch, and the number of micro-batches in the step.
        """
        sample = self._small, self._shape[0], self._micro_batches
        self._small, self._micro_batches = None, 0
        return sample

    def add(self, estimates: Tensor) -> None:
        """Add estimates (2,) of tr(Σ) and |G|² to the moving averages, unless one of them is not finite."""
        if self.sums is None:
            self.sums = estimates.new_zeros(3)
        sums = self.sums.to(estimates.device)
        new = self.decay * sums + (1 - self.decay) * torch.cat([estimates, torch.ones_like(estimates[:1])])
        self.sums = torch.where(estimates.isfinite().all(), new, sums)

    def _row(self, trace: float, square: float) -> dict[str, float]:
        row = {"gradient_noise/variance": trace, "gradient_noise/squared_norm": square}
        if square > 0:
            row["gradient_noise/scale_samples"] = trace / square
            if self._shape[1] > 1:
                row["gradient_noise/scale_tokens"] = trace / square * self._shape[1]
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"sums": None if self.sums is None else self.sums.tolist()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        sums = state_dict["sums"]
        self.sums = None if sums is None else torch.tensor(sums, dtype=torch.float64)


def _square(norm: Tensor) -> Tensor:
    """The square of a norm, in float64 because estimates are differences of large numbers; in float32 on MPS."""
    return (norm if norm.device.type == "mps" else norm.double()).square()


def _shape(batch: Any) -> tuple[int, int]:
    """(samples of a batch, tokens of a sample), from the batch's first tensor. Tokens: 1 unless this tensor is int (B, T)."""
    first = next(tensors_in(batch), None)
    if first is None or first.ndim == 0:
        return 1, 1
    return first.size(0), first.size(1) if first.ndim == 2 and not first.is_floating_point() else 1

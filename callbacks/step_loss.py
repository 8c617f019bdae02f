"""The loss of an optimizer step, for callbacks that judge it."""

from __future__ import annotations

from typing import Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor


class GivesStepLoss(Protocol):
    """A LightningModule that says what the loss of its step is. Callbacks then read that, not what `training_step` returns.

    Needed where micro-batches or ranks have different numbers of counted targets, because the mean of their means is another
    number. Both are 0-d tensors, the same on all ranks, and set before callbacks' `on_before_optimizer_step`.
    """

    step_loss: Tensor
    """Mean loss over the counted targets of the global batch. NaN without any."""
    step_count: Tensor
    """The number of these targets. A step with 0 is no observation."""


class MeanOfMicroBatches:
    """The mean loss of the micro-batches of a step on this rank, from `on_before_backward`."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._number = 0

    def add(self, trainer: Trainer, loss: Tensor) -> None:
        """Add the loss of a backward pass, as Lightning gives it: divided by the number of micro-batches of a whole step."""
        loss = loss.detach().float().reshape(())
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            loss = loss / scaler.scale(torch.ones((), device=loss.device))
        self._sum = loss if self._sum is None else self._sum + loss
        self._number += 1

    def take(self, trainer: Trainer) -> Tensor | None:
        """The mean; None without a backward pass. Starts over. An epoch may end before the step has all its micro-batches."""
        total, number = self._sum, self._number
        self._sum, self._number = None, 0
        return None if total is None else total * max(1.0, trainer.accumulate_grad_batches / number)

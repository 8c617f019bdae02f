"""The loss of an optimizer step, for callbacks that judge it.

The mean of the micro-batches' means is not the loss of the step where they have different numbers of counted targets. So a
LightningModule can say it: `step_loss`, the mean over the counted targets of the global batch, NaN without any, and
`step_count`, their number: 0-d tensors, the same on all ranks, known before callbacks' `on_before_optimizer_step`.
"""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from torch import Tensor


class MeanOfMicroBatches:
    """The mean loss of a step's micro-batches on this rank, from `on_before_backward`: of a module that does not say it."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._number = 0

    def add(self, trainer: Trainer, loss: Tensor) -> None:
        """Add the loss of a backward pass, as Lightning gives it: divided by the number of micro-batches of a whole step."""
        loss = loss.detach().float().reshape(())
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            loss = loss / scaler.scale(torch.ones((), device=loss.device))
        self._sum, self._number = loss if self._sum is None else self._sum + loss, self._number + 1

    def take(self, trainer: Trainer) -> Tensor | None:
        """The mean; None without a backward pass. Starts over. An epoch may end before the step has all its micro-batches."""
        total, number, self._sum, self._number = self._sum, self._number, None, 0
        return None if total is None else total * max(1.0, trainer.accumulate_grad_batches / number)

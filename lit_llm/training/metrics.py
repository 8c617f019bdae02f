"""Mean loss and bits per byte as torchmetrics: sums over batches and ranks, with one division at the end.

Averaging per-batch or per-rank values would be wrong if the numbers of tokens differ, as in the last batch of a validation
set. States and results are 0-d float64 tensors, because a float32 sum of a billion nats is too coarse to compare losses. On
MPS they are float32, because it does not support float64. A result is NaN before the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class _Ratio(Metric):
    """Sum of NLL divided by a sum of sizes. Subclasses define the unit of the size and transform the ratio."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    nll_sum: Tensor
    size: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("nll_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("size", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> _Ratio:
        # bf16-true precision calls to(bfloat16) on the whole LightningModule, which would round the sums.
        def without_cast(t: Tensor) -> Tensor:
            try:
                moved = fn(t)
            except TypeError:
                return fn(t.float())  # MPS
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(without_cast, exclude_state)
        return self

    def _add(self, nll_sum: Tensor | float, size: Tensor | int) -> None:
        self.nll_sum = self.nll_sum + nll_sum  # torchmetrics runs updates under no_grad
        self.size = self.size + size

    def _mean(self) -> Tensor:
        return self.nll_sum / self.size


class MeanLoss(_Ratio):
    """Nats per token. Not its exp, the perplexity, which overflows at 710 nats."""

    def update(self, nll_sum: Tensor | float, count: Tensor | int) -> None:
        """Add a batch: its summed negative log-likelihood in nats, and the number of tokens in that sum."""
        self._add(nll_sum, count)

    def compute(self) -> Tensor:
        return self._mean()


class BitsPerByte(_Ratio):
    """NLL in nats / (ln 2 · UTF-8 bytes of the decoded text): comparable across tokenizers; 8 times a compression ratio."""

    def update(self, nll_sum: Tensor | float, num_bytes: Tensor | int) -> None:
        """Add a batch: its summed negative log-likelihood in nats, and the number of UTF-8 bytes that its targets decode to."""
        self._add(nll_sum, num_bytes)

    def compute(self) -> Tensor:
        return self._mean() / math.log(2)

"""Metrics of language modelling as torchmetrics: sums first, over batches and ranks, and one division at the end.

Averaging per-batch or per-rank values is wrong as soon as two of them count different numbers of tokens, as the last
batch of a held-out set does. States and results are 0-d float64 tensors (float32 on MPS, which has no more): a float32
sum of a billion nats has lost the digits that are compared. A result is NaN as long as nothing was counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class _Ratio(Metric):
    """Sum of NLL over sum of what it is counted in; subclasses say in what, and what is made of it."""

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
        # Module.to(bfloat16), as bf16-true precision does to all that a LightningModule holds, would round the sums.
        def without_cast(t: Tensor) -> Tensor:
            try:
                moved = fn(t)
            except TypeError:
                return fn(t.float())  # MPS
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(without_cast, exclude_state)
        return self

    def _add(self, nll_sum: Tensor | float, size: Tensor | int) -> None:
        self.nll_sum = self.nll_sum + nll_sum  # torchmetrics runs updates without a graph
        self.size = self.size + size

    def _mean(self) -> Tensor:
        return self.nll_sum / self.size


class Perplexity(_Ratio):
    """exp(nats per token): of how many equally likely tokens the model is choosing among."""

    def update(self, nll_sum: Tensor | float, count: Tensor | int) -> None:
        """Add a batch: its summed negative log-likelihood in nats, and the number of tokens in the sum."""
        self._add(nll_sum, count)

    def compute(self) -> Tensor:
        return self._mean().exp()


class BitsPerByte(_Ratio):
    """NLL / (ln 2 · bytes of the decoded text): comparable across tokenizers, and with a compressor's ratio times 8."""

    def update(self, nll_sum: Tensor | float, num_bytes: Tensor | int) -> None:
        """Add a batch: its summed negative log-likelihood in nats, and how many UTF-8 bytes its targets decode to."""
        self._add(nll_sum, num_bytes)

    def compute(self) -> Tensor:
        return self._mean() / math.log(2)

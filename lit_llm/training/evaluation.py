"""What validation and test measure: mean loss and bits per byte, sums over batches and ranks with one division at the end.

Averaging per-batch or per-rank values would be wrong if the numbers of tokens differ, as in the last batch of a validation
set. States and results are 0-d float64 tensors, because a float32 sum of a billion nats is too coarse to compare losses. On
MPS they are float32, because it does not support float64. A result is NaN before the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchmetrics import Metric

from lit_llm.models.loss import LossSums
from lit_llm.training.accumulation import Means, SourceLosses


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


class Evaluation(nn.Module):
    """The metrics of one pass over held-out data. A module, so that the sums are where the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_loss, self.bits_per_byte = MeanLoss(), BitsPerByte()
        self.sources, self.means = SourceLosses(()), Means(())
        self.of_tokens = True
        self.token_bytes: Tensor | None = None

    def start(
        self,
        token_bytes: Tensor | None,
        sources: Sequence[str],
        device: torch.device,
        *,
        means: Sequence[str] = (),
        of_tokens: bool = True,
    ) -> None:
        """Start over.

        Args:
            token_bytes: (V,), UTF-8 bytes of each id. None: bits per byte are not measured.
            sources: names of the sources of a mixture.
            means: names of further means, those of `LossSums.means`.
            of_tokens: the loss is nats per token. Otherwise there are no perplexity and no bits per byte.
        """
        self.mean_loss.reset()
        self.bits_per_byte.reset()
        self.sources, self.means, self.of_tokens = SourceLosses(sources), Means(means), of_tokens
        self.token_bytes = token_bytes.to(device) if token_bytes is not None and of_tokens else None

    def add(self, batch: dict[str, Tensor], sums: LossSums, *, parts: int) -> None:
        """Add a batch.

        Args:
            parts: number of ranks that have this batch; the sums are this rank's part.
        """
        self.mean_loss.update(sums.nll, sums.count)
        self.means.add(sums)
        if "sources" in batch:
            self.sources.add(batch["sources"], sums)
        if self.token_bytes is not None:
            targets = batch["targets"]
            counted = targets >= 0  # (B, T)
            self.bits_per_byte.update(sums.nll, (self.token_bytes[targets.clamp(min=0)] * counted).sum() / parts)

    def row(self, prefix: str, trainer: Trainer) -> dict[str, float]:
        """The values by name, such as "val/loss". A collective."""
        loss = float(self.mean_loss.compute())  # sums over all ranks
        row = {f"{prefix}/loss": loss} | ({f"{prefix}/perplexity": safe_exp(loss)} if self.of_tokens else {})
        if self.token_bytes is not None:
            row[f"{prefix}/bits_per_byte"] = float(self.bits_per_byte.compute())
        device = trainer.strategy.root_device
        for further in (self.sources, self.means):
            if further.names:
                sums = trainer.strategy.reduce(further.take(device), reduce_op="sum")
                assert isinstance(sums, Tensor)
                row |= further.row(prefix, sums.tolist())
        return row


def safe_exp(loss: float) -> float:
    """exp, infinity on overflow."""
    return math.inf if loss >= 700 else math.exp(loss)


def without_repeats(batch: dict[str, Tensor], batch_idx: int, loader: Any) -> dict[str, Tensor]:
    """The batch with ignored targets in the rows that a `DistributedSampler` repeats, so that all ranks have equally many.

    Rank r of R takes samples r, r + R, …, then the first again.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return batch
    size = getattr(batches, "batch_size", 1)  # samples; one can have several rows
    first, targets, total = batch_idx * size, batch["targets"], len(sampler.dataset)  # type: ignore[arg-type]
    samples = min(size, sampler.num_samples - first)
    if (first + samples - 1) * sampler.num_replicas + sampler.rank < total:
        return batch
    row = torch.arange(len(targets), device=targets.device)
    sample = (first + row * samples // len(row)) * sampler.num_replicas + sampler.rank
    return {**batch, "targets": targets.masked_fill((sample >= total)[:, None], -100)}

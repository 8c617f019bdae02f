"""Computes the metrics of validation and test: mean losses, perplexity and bits per byte."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DistributedSampler
from torchmetrics import Metric

from lit_llm.core._torch import IGNORED
from lit_llm.models.loss import LossSums
from lit_llm.training.accumulation import LossMeans, wide


class Evaluation(Metric):
    """Metric that sums losses in one pass over held-out data. Make a new one for each pass: the precision bf16-true would round
    the sums of a metric that the module keeps.

    `compute` adds the sums of all ranks. It returns metric → value, such as "val/loss", which is NaN if no target is counted.
    Bits per byte are nats / (ln 2 · UTF-8 bytes of the text): comparable across tokenizers, and 8 times a compression ratio.

    Args:
        prefix: the first part of the names of metrics, "val" or "test".
        losses: the layout of the loss sums, and the names of the mean losses.
        token_bytes: (V,), UTF-8 bytes of each id. None: bits per byte are not measured.
        of_tokens: whether the loss is in nats per token. If not, perplexity and bits per byte are not measured.
    """

    is_differentiable = False
    full_state_update = False

    sums: Tensor
    text_bytes: Tensor

    def __init__(
        self, prefix: str, losses: LossMeans, token_bytes: Tensor | None, device: torch.device, *, of_tokens: bool
    ) -> None:
        super().__init__()
        self.prefix, self.losses, self.of_tokens = prefix, losses, of_tokens
        self.token_bytes = token_bytes.to(device) if token_bytes is not None and of_tokens else None
        self.add_state("sums", losses.zeros(device), dist_reduce_fx="sum")
        self.add_state("text_bytes", torch.zeros((), dtype=wide(device), device=device), dist_reduce_fx="sum")

    def update(self, batch: dict[str, Tensor], sums: LossSums, *, parts: int) -> None:
        """Add the loss sums of a batch to the sums of the pass.

        Args:
            sums: this rank's part of the batch's loss sums.
            parts: number of ranks that share this batch.
        """
        self.sums = self.sums + self.losses.of(batch, sums)
        if self.token_bytes is not None:
            targets = batch["targets"]
            counted = targets >= 0  # (B, T)
            self.text_bytes = self.text_bytes + (self.token_bytes[targets.clamp(min=0)] * counted).sum() / parts

    def compute(self) -> dict[str, float]:
        name = f"{self.prefix}/loss"
        row = {name: math.nan} | self.losses.row(self.prefix, self.sums)
        if self.of_tokens:
            row[f"{self.prefix}/perplexity"] = safe_exp(row[name])
        if self.token_bytes is not None:
            row[f"{self.prefix}/bits_per_byte"] = float(self.sums[0, 0] / (math.log(2) * self.text_bytes))
        return row


def safe_exp(loss: float) -> float:
    """The perplexity exp(loss); infinity if it is too large for a float."""
    return math.inf if loss >= 700 else math.exp(loss)


def without_repeats(batch: dict[str, Tensor], batch_idx: int, trainer: Trainer, dataloader_idx: int) -> dict[str, Tensor]:
    """The batch, with targets of -100 in the rows that a `DistributedSampler` repeats to give all ranks equally many samples.

    Rank r of R takes samples r, r + R, …; after the last sample, the sampler starts again with the first sample.

    Args:
        batch_idx, dataloader_idx: index of the batch in its loader, and index of the loader in the validation or test.
    """
    loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    loader: Any = CombinedLoader(loaders).flattened[dataloader_idx]
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return batch
    size = getattr(batches, "batch_size", 1)  # in samples; a sample can have several rows
    first, targets, total = batch_idx * size, batch["targets"], len(sampler.dataset)  # type: ignore[arg-type]
    samples = min(size, sampler.num_samples - first)
    if (first + samples - 1) * sampler.num_replicas + sampler.rank < total:
        return batch
    row = torch.arange(len(targets), device=targets.device)
    sample = (first + row * samples // len(row)) * sampler.num_replicas + sampler.rank
    return {**batch, "targets": targets.masked_fill((sample >= total)[:, None], IGNORED)}

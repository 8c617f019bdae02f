"""What validation and test measure: mean loss and bits per byte, sums over batches and ranks with one division at the end.

Averaging per-batch or per-rank values would be wrong if the numbers of tokens differ, as in the last batch of a validation
set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DistributedSampler

from lit_llm.models.loss import LossSums
from lit_llm.training.accumulation import SourceLosses, wide


class Evaluation:
    """The sums of one pass over held-out data, on the device. Without a counted target, the results are NaN.

    Args:
        token_bytes: (V,), UTF-8 bytes of each id. None: bits per byte are not measured.
        sources: names of the sources of a mixture.
    """

    def __init__(self, token_bytes: Tensor | None, sources: Sequence[str], device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=wide(device), device=device)
        """Nats, counted targets, and UTF-8 bytes of these."""
        self.sources = SourceLosses(sources)
        self.token_bytes = None if token_bytes is None else token_bytes.to(device)

    def add(self, batch: dict[str, Tensor], sums: LossSums, *, parts: int) -> None:
        """Add a batch.

        Args:
            parts: number of ranks that have this batch; the sums are this rank's part.
        """
        zero = self.sums.new_zeros(())
        size = zero
        if self.token_bytes is not None:
            targets = batch["targets"]
            counted = targets >= 0  # (B, T)
            size = (self.token_bytes[targets.clamp(min=0)] * counted).sum() / parts
        self.sums = self.sums + torch.stack([zero + each for each in (sums.nll, sums.count, size)])
        if "sources" in batch:
            self.sources.add(batch["sources"], sums)

    def row(self, prefix: str, trainer: Trainer) -> dict[str, float]:
        """The values by name: "val/loss" in nats per token, "val/perplexity", "val/bits_per_byte", … A collective.

        Bits per byte, nats / (ln 2 · bytes), can be compared across tokenizers: 8 times a compression ratio.
        """
        reduced = trainer.strategy.reduce(torch.cat([self.sums, self.sources.take(self.sums.device)]), reduce_op="sum")
        assert isinstance(reduced, Tensor)
        nll, count, size, *by_source = reduced.tolist()
        loss = nll / count if count else math.nan
        row = {f"{prefix}/loss": loss, f"{prefix}/perplexity": safe_exp(loss)}
        if self.token_bytes is not None:
            row[f"{prefix}/bits_per_byte"] = nll / math.log(2) / size if size else math.nan
        return row | self.sources.losses(prefix, by_source)


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

"""The rows that a `DistributedSampler` repeats, so that all ranks have equally many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


def without_repeats(batch: dict[str, Tensor], batch_idx: int, loader: Any) -> dict[str, Tensor]:
    """The batch with ignored targets in repeated rows: rank r of R takes samples r, r + R, …, then the first again."""
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

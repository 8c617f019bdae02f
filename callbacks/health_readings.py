"""Measurements of a sampled step: they stay on the device, are reduced over the ranks together, and are read once."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch import process_count

Number = Tensor | float


class Readings:
    """Collects means and maxima by name. Adding a number does not synchronise the host with the device.

    Every rank must add the same names in the same order.

    Args:
        device: where numbers are collected.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self._totals: dict[str, tuple[Tensor, Tensor]] = {}
        self._largest: dict[str, Tensor] = {}
        self._roots: set[str] = set()

    def mean(self, name: str, total: Number, count: Number) -> None:
        """Add `total` and `count` to the mean `name`: (sum of `total`) / (sum of `count`), over all calls and ranks."""
        added = self._plain(total), self._plain(count)
        old = self._totals.get(name)
        self._totals[name] = added if old is None else (old[0] + added[0], old[1] + added[1])

    def root_mean(self, name: str, total: Number, count: Number) -> None:
        """Add `total` and `count` to the root mean `name`: √(sum of `total` / sum of `count`), over all calls and ranks."""
        self._roots.add(name)
        self.mean(name, total, count)

    def largest(self, name: str, value: Number) -> None:
        """Take `value` into the maximum `name`, which is the largest value of all calls and ranks."""
        value, old = self._plain(value), self._largest.get(name)
        self._largest[name] = value if old is None else torch.maximum(old, value)

    def take(self, other: Readings) -> None:
        """Add all means and maxima of `other` to these readings."""
        for name, (total, count) in other._totals.items():
            (self.root_mean if name in other._roots else self.mean)(name, total, count)
        for name, value in other._largest.items():
            self.largest(name, value)

    def _plain(self, value: Number) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, self._dtype)
        return torch.full((), value, dtype=self._dtype, device=self.device)

    def read(self) -> dict[str, float]:
        """Return {name: value} of means whose summed `count` is above 0, and of maxima. A collective; the host synchronises."""
        pairs = [each for pair in self._totals.values() for each in pair]
        sums = torch.stack(pairs) if pairs else torch.empty(0, dtype=self._dtype, device=self.device)
        largest = list(self._largest.values())
        maxima = torch.stack(largest) if largest else sums[:0]
        if process_count() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        values = torch.cat([sums, maxima]).tolist()
        means = {}
        for i, name in enumerate(self._totals):
            total, count = values[2 * i : 2 * i + 2]
            if count:
                means[name] = math.sqrt(max(total / count, 0.0)) if name in self._roots else total / count
        return means | dict(zip(self._largest, values[len(pairs) :], strict=True))

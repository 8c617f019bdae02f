"""The key/value cache of text generation.

Shape letters: B sequences, T new positions, S positions so far, K key/value heads, h ``head_dim``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_llm.models.config import GPTConfig


class LayerCache:
    """Keys and values of one layer, (B, K, capacity, h) each, filled from position 0; of latent attention the latents alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.held: tuple[Tensor, ...] = ()
        self._past: dict[nn.Module, Tensor] = {}

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Store tensors of T new positions, (B, K, T, h); return all so far as (B, K, S, h) views."""
        self.held = self.held or tuple(x.new_empty(*x.shape[:2], self.capacity, x.size(3)) for x in new)
        start, self.length = self.length, self.length + new[0].size(2)
        for held, x in zip(self.held, new, strict=True):
            held[:, :, start : self.length] = x
        return tuple(held[:, :, : self.length] for held in self.held)

    def with_past(self, module: nn.Module, x: Tensor, positions: int) -> Tensor:
        """(B, T, c) → (B, positions + T, c): a module's new inputs after those at the positions before, which are kept."""
        past = self._past.get(module)
        x = torch.cat((x.new_zeros(x.size(0), positions, x.size(2)) if past is None else past, x), dim=1)
        self._past[module] = x[:, x.size(1) - positions :]
        return x


class KVCache:
    """One `LayerCache` per block, so that generation computes each position once. All positions are one document.

    Args:
        capacity: maximum number of positions. None: block_size, which is up to 131,072 in imported models.
    """

    def __init__(self, config: GPTConfig, capacity: int | None = None) -> None:
        self.layers = [LayerCache(config.block_size if capacity is None else capacity) for _ in range(config.n_layer)]

    @property
    def length(self) -> int:
        return self.layers[0].length

"""The key/value cache of text generation.

Shape letters: B sequences, T new positions, S positions so far, K key/value heads, h ``head_dim``, c channels.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lit_llm.models.config import GPTConfig


class Positions:
    """Stores a tensor (B, K, S, h), to which positions are appended.

    Args:
        capacity: number of positions to allocate. If more are appended, all positions are copied into a larger tensor.
        before: (B, K, n, h), values at n positions before position 0; the tensor begins with these values. None: n is 0.
    """

    def __init__(self, capacity: int, before: Tensor | None = None) -> None:
        self.held, self.before = before, 0 if before is None else before.size(2)
        self.capacity, self.length = capacity + self.before, self.before

    def append(self, new: Tensor) -> Tensor:
        """Store T new positions (B, K, T, h). Return the n positions of `before` and all S stored ones, as a view
        (B, K, n + S, h)."""
        start, self.length = self.length, self.length + new.size(2)
        if self.held is None or self.held.size(2) < self.length:
            larger = new.new_empty(*new.shape[:2], max(self.capacity, self.length + start), new.size(3))
            if self.held is not None:
                larger[:, :, :start] = self.held[:, :, :start]
            self.held = larger
        self.held[:, :, start : self.length] = new
        return self.held[:, :, : self.length]


class LayerCache:
    """The cached tensors of one layer: keys and values, or latents and rotary keys; and the inputs of convolutions.

    The inputs of convolutions are cached for every position, so that `KVCache.cut` can shorten a text to any prefix.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.parts: dict[nn.Module | int, Positions] = {}

    @property
    def length(self) -> int:
        """Number of positions whose keys are cached."""
        return self.parts[0].length if 0 in self.parts else 0

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Store tensors (B, K, T, h) of T new positions. Return the tensors of all positions so far, as views (B, K, S, h)."""
        return tuple(self.parts.setdefault(i, Positions(self.capacity)).append(x) for i, x in enumerate(new))

    def with_past(self, module: nn.Module, x: Tensor, positions: int) -> Tensor:
        """Store a module's new inputs x. Return x with the module's inputs at the last `positions` positions before x (zeros
        before the first position of a text): (B, T, c) → (B, positions + T, c)."""
        if module not in self.parts:
            self.parts[module] = Positions(self.capacity, x.new_zeros(x.size(0), 1, positions, x.size(2)))
        return self.parts[module].append(x[:, None])[:, 0, -positions - x.size(1) :]


class KVCache:
    """One `LayerCache` per block, so that generation computes each position once.

    Args:
        capacity: expected number of positions. None: `config.block_size`, which may be 131,072 in imported models.
    """

    def __init__(self, config: GPTConfig, capacity: int | None = None) -> None:
        self.layers = [LayerCache(config.block_size if capacity is None else capacity) for _ in range(config.n_layer)]

    @property
    def length(self) -> int:
        return self.layers[0].length

    @property
    def _parts(self) -> Iterator[Positions]:
        return (part for layer in self.layers for part in layer.parts.values())

    def cut(self, length: int) -> None:
        """Forget the positions from `length` on in all layers, even if an interrupted pass has appended to some layers only."""
        for part in self._parts:
            part.length = part.before + length

    def keep(self, rows: list[int]) -> None:
        """Keep only the sequences with the row numbers `rows` in the cache, in the order of `rows`."""
        for part in self._parts:
            part.held = None if part.held is None else part.held[rows]

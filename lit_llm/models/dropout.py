"""Dropout whose mask is a function of a value's place, not of a generator's state.

The mask of a value is a hash of the seed of the micro-batch, the layer, the site in it, the row of the batch, the position in
the sequence, and the channel. An attention weight has the head and the positions of query and key instead of position and
channel. So any layout of ranks drops the values that one process drops, and so does a recomputation. No generator state is
saved, and no mask: the backward pass computes it again.

A value is kept if the product of two 64-bit numbers, modulo 2⁶⁴, is large: one for its row, site and position, and one for its
channel (multiply-shift hashing, Dietzfelbinger et al. 1997).

Shape letters: B sequences, T positions, S positions of keys, H query heads, d channels, L layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

SITES = (
    *("attention.weights", "attention.output", "mlp.output"),  # model.dropout
    *(
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.project",
        "attention.query_latent",
        "attention.latent",
        "attention.rotary_key",
        "mlp.up",
        "mlp.gate",
        "mlp.project",
    ),  # LoRA's
)
"""The sites: names of the places in a block that drop values. Other functions take a site as its index here."""
ELEMENTS = 2**20  # approximate number of mask elements in memory at a time: 8 MB

_A, _B = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd, with random bits: 2⁶⁴ / golden ratio; splitmix64's


class Drops(NamedTuple):
    """The numbers from which the masks of a forward pass are computed; those that `Drops.of` returns are for one block."""

    keys: Tensor
    """(L + 1, sites) int64: a number for each block and site; the last row is the embedding's. For one block: (sites,)."""
    rows: Tensor
    """(B, T) int64: a number for each sequence of the batch and each of this rank's positions."""
    all_rows: Tensor
    """(B, S) int64: the numbers of all positions of the sequence, also if ranks share it."""
    queries: Tensor
    """(B, queries) int64: numbers of queries whose attention this rank computes: `rows`, or with shared heads `all_rows`."""
    stream: Tensor
    """(B, positions) int64: numbers of this rank's positions in the residual stream: `rows`, or (tensor parallelism) a part."""
    numbers: Tensor
    """(n,) int64: the number at index i belongs to channel i, to head i, and to a key at position i."""

    def of(self, layer: int) -> Drops:
        """Return the `Drops` of one block; -1: of the embedding."""
        return self._replace(keys=self.keys[layer])


class WeightDrops(NamedTuple):
    """The numbers from which the mask of attention weights is computed."""

    rate: float
    rows: Tensor
    """(B, T) int64: the numbers of the queries."""
    heads: Tensor
    """(H,) int64: the numbers of the heads."""
    columns: Tensor
    """(S,) int64: the numbers of the keys."""


def new_seed() -> Tensor:
    """The seed of a micro-batch: a scalar int64 from the CPU's generator, which `StepSeed` seeds."""
    return torch.randint(2**62, (), dtype=torch.int64, device="cpu")


def make_drops(seed: Tensor, *, layers: int, batch: int, positions: Tensor, width: int) -> Drops:
    """Return the `Drops` of a micro-batch. The host does not wait for the device.

    Args:
        seed: scalar int64, not negative.
        layers: L, the number of all blocks of the model.
        positions: (T,) int64: the positions of the whole sequence, on this rank's device.
        width: upper bound of channels, of heads, and of positions of the whole sequence.
    """
    device = positions.device
    start = _scramble(seed.to(device, non_blocking=True))
    keys = _scramble(start + torch.arange((layers + 1) * len(SITES), device=device))
    # Negative numbers of rows, because a seed is positive: a key equal to a row's number would drop nothing, or all.
    rows = _scramble(_scramble(-1 - torch.arange(batch, device=device))[:, None] + positions)  # (B, T)
    numbers = _scramble(torch.arange(width, device=device) - start)
    return Drops(keys.view(layers + 1, len(SITES)), rows, rows, rows, rows, numbers)


def drop(x: Tensor, rate: float, drops: Drops | None, site: int, *, stream: bool = True, first: int = 0) -> Tensor:
    """Zero a share of (B, T, d) values in expectation, and divide the others by 1 - rate.

    Args:
        drops: the `Drops` of one block. None: nothing is dropped.
        site: index in `SITES`.
        stream: whether the positions of x are those of `Drops.stream`; False: they are those of `Drops.rows`.
        first: number of the first channel of x, which is above 0 if another rank has the channels before it.
    """
    if drops is None or rate == 0:
        return x
    rows = drops.stream if stream else drops.rows
    return _Drop.apply(x, rows, drops.keys[site], drops.numbers[first : first + x.size(-1)], rate)


def drop_weights(drops: Drops | None, rate: float, heads: int, keys: int, *, first_head: int = 0) -> WeightDrops | None:
    """Return the `WeightDrops` for the attention of a block; None if nothing is dropped.

    Args:
        drops: the `Drops` of the block. None: nothing is dropped.
        heads: number of query heads on this rank, whose numbers begin at `first_head`.
        keys: S; the keys are at the first S positions of the sequence.
    """
    if drops is None or rate == 0:
        return None
    of_heads = drops.numbers[first_head : first_head + heads] ^ drops.keys[SITES.index("attention.weights")]
    return WeightDrops(rate, drops.queries, of_heads, drops.numbers[:keys])


class DropsInputs(nn.Linear):
    """A linear layer that drops inputs: its forward takes an argument `drops`."""

    def merged(self) -> Tensor:
        """Return the matrix (o, i) that the layer applies without dropout."""
        raise NotImplementedError


def apply_linear(layer: nn.Module, x: Tensor, drops: Drops | None) -> Tensor:
    """Apply a linear layer of a block, which may drop inputs: (B, T, i) → (B, T, o)."""
    return layer(x, drops=drops) if isinstance(layer, DropsInputs) else layer(x)


def kept(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return a mask (…, n) bool of the values that are kept.

    Args:
        rows: (…) int64, results of `hashed`.
        columns: (n,) int64, numbers of channels or of keys.
        rate: probability of dropping a value.
    """
    return rows[..., None] * columns >= round(rate * 2**64) - 2**63  # products wrap around


def hashed(rows: Tensor, key: Tensor) -> Tensor:
    """Hash numbers of rows with a key of a site or head: int64 of the broadcast shape."""
    return _mix(rows ^ key)


class _Drop(Function):
    """Drops a gradient where it drops the value. It saves no mask, only tensors that all sites share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, key: Tensor, columns: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(rows, key, columns)
        ctx.rate = rate
        return _dropped(x, rows, key, columns, rate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, key, columns = ctx.saved_tensors
        return _dropped(gradient, rows, key, columns, ctx.rate), None, None, None, None


def _dropped(x: Tensor, rows: Tensor, key: Tensor, columns: Tensor, rate: float) -> Tensor:
    numbers, scale = hashed(rows, key), 1 / (1 - rate)
    if torch.compiler.is_compiling():  # a compiler makes one loop of it
        return x * kept(numbers, columns, rate) * scale
    out = torch.empty_like(x)
    step = max(1, ELEMENTS // (x.size(0) * x.size(-1)))  # positions at a time
    for first in range(0, x.size(1), step):
        part = slice(first, first + step)
        torch.mul(x[:, part], kept(numbers[:, part], columns, rate), out=out[:, part])
    return out.mul_(scale)


def _mix(x: Tensor) -> Tensor:
    """Spread the bits of random 64-bit numbers, so that related numbers give unrelated ones."""
    x = x * _A
    return (x ^ (x >> 32)) * _B


def _scramble(x: Tensor) -> Tensor:
    """Turn small numbers into random 64-bit numbers."""
    return _mix(_mix(x + _B))

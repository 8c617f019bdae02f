"""Dropout whose mask is a hash of a value's place in the model and batch, and does not depend on a generator's state.

The mask of a value is a hash of: seed of the micro-batch, layer, site in the layer, row of the batch, position in the
sequence, and channel. For an attention weight, head and the positions of query and key replace position and channel. So any
layout of ranks, and any recomputation, drops the same values as one process. No generator state is saved, and no mask: the
backward pass computes the mask again.

A value is not dropped if the product of two 64-bit numbers, modulo 2⁶⁴, is large: a number for the value's row, site and
position, and a number for its channel (multiply-shift hashing, Dietzfelbinger et al. 1997).

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
"""Sites: names of the places in a block where dropout is applied. Functions take a site as its index in this tuple."""
ELEMENTS = 2**20  # approximate number of mask elements in memory at a time: 8 MB

_A, _B = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd, with random bits: 2⁶⁴ / golden ratio; splitmix64's


class Drops(NamedTuple):
    """Record of random numbers that give the dropout masks of a forward pass. `of` returns the `Drops` of one block."""

    keys: Tensor
    """(L + 1, sites) int64: a random number per block and site; the last row is for the embedding. Of one block: (sites,)."""
    rows: Tensor
    """(B, T) int64: a random number for each sequence of the batch and each of this rank's positions."""
    all_rows: Tensor
    """(B, S) int64: the random numbers `rows` for all positions of the sequence, also if ranks share the sequence."""
    queries: Tensor
    """(B, queries) int64: random numbers of the queries whose attention this rank computes: `rows`, or `all_rows` if context
    ranks split attention by heads."""
    stream: Tensor
    """(B, positions) int64: random numbers of this rank's positions in the residual stream: `rows`, or under tensor
    parallelism a part of `rows`."""
    numbers: Tensor
    """(n,) int64: the random number at index i is for channel i, for head i, and for a key at position i."""

    def of(self, layer: int) -> Drops:
        """Return the `Drops` of block `layer`, or of the embedding if `layer` is -1."""
        return self._replace(keys=self.keys[layer])


class WeightDrops(NamedTuple):
    """Record of the dropout rate of attention weights, and of the random numbers that give their dropout mask."""

    rate: float
    rows: Tensor
    """(B, T) int64: a random number for each query."""
    heads: Tensor
    """(H,) int64: a random number for each head."""
    columns: Tensor
    """(S,) int64: a random number for each key."""


def new_seed() -> Tensor:
    """Draw the seed of a micro-batch, a scalar int64, from the CPU's random generator, which `StepSeed` seeds."""
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
    """Apply dropout: set values of x (B, T, d) to zero with probability `rate`, and divide the other values by 1 - rate.

    Args:
        drops: the `Drops` of one block. None: nothing is dropped.
        site: index of the place in `SITES`.
        stream: whether x is in the residual stream, which has the positions of `Drops.stream`: under tensor parallelism only a
            part of this rank's positions. False: x has all of this rank's positions, those of `Drops.rows`.
        first: number of the first channel of x, which is above 0 if another rank has earlier channels.
    """
    if drops is None or rate == 0:
        return x
    rows = drops.stream if stream else drops.rows
    return _Drop.apply(x, rows, drops.keys[site], drops.numbers[first : first + x.size(-1)], rate)


def drop_weights(drops: Drops | None, rate: float, heads: int, keys: int, *, first_head: int = 0) -> WeightDrops | None:
    """Return the `WeightDrops` for the attention of a block; None if nothing is dropped.

    Args:
        drops: the `Drops` of the block. None: nothing is dropped.
        heads: number of query heads on this rank, of which `first_head` is the first.
        keys: number of keys S; the keys are at the first S positions of the sequence.
    """
    if drops is None or rate == 0:
        return None
    of_heads = drops.numbers[first_head : first_head + heads] ^ drops.keys[SITES.index("attention.weights")]
    return WeightDrops(rate, drops.queries, of_heads, drops.numbers[:keys])


class DropsInputs(nn.Linear):
    """Base class of linear layers with dropout of inputs, such as LoRA's: `forward` takes an argument `drops`."""

    def merged(self) -> Tensor:
        """Return the matrix (o, i) that the layer applies without dropout. Each subclass defines this."""
        raise NotImplementedError


def apply_linear(layer: nn.Module, x: Tensor, drops: Drops | None) -> Tensor:
    """Apply a linear layer of a block, (B, T, i) → (B, T, o). `drops` is passed on to layers with dropout of inputs."""
    return layer(x, drops=drops) if isinstance(layer, DropsInputs) else layer(x)


def kept(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return a mask (…, n) bool: True for values that are not dropped.

    Args:
        rows: (…) int64, results of `hashed`.
        columns: (n,) int64, random numbers of channels or of keys.
        rate: probability of dropping a value.
    """
    return rows[..., None] * columns >= round(rate * 2**64) - 2**63  # products wrap around


def hashed(rows: Tensor, key: Tensor) -> Tensor:
    """Hash random numbers of rows (positions or queries) with the key of a site or head: int64 of the broadcast shape."""
    return _mix(rows ^ key)


class _Drop(Function):
    """Applies dropout, and in backward the same mask to the gradient. Saves no mask, only tensors that all sites share."""

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
    """Mix the bits of random 64-bit numbers, so that related numbers give unrelated results."""
    x = x * _A
    return (x ^ (x >> 32)) * _B


def _scramble(x: Tensor) -> Tensor:
    """Hash small integers to random 64-bit numbers."""
    return _mix(_mix(x + _B))

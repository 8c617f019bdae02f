"""Dropout whose mask is a function of the place, not of a generator's state.

The mask of a value is a hash of the seed of the micro-batch, the layer, the site in it, the row of the batch, the position in
the sequence, and the channel. For an attention weight it is the row, the head, the query's position and the key's position.
So ranks that hold other layers, positions, heads or channels drop what one process drops, and so does a recomputation. No
generator state is saved, and no mask: the backward pass computes it again.

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
"""The places of a block that drop values."""
ELEMENTS = 2**20  # of a mask at a time, about: 8 MB

_A, _B = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd, with random bits: 2⁶⁴ / golden ratio; splitmix64's


class Drops(NamedTuple):
    """What determines the masks of a forward pass, or of a block in it. `Drops.of` selects the block."""

    keys: Tensor
    """(L + 1, sites) int64; the last row is the embedding's. Of a block: (sites,)."""
    rows: Tensor
    """(B, T) int64: a number for each row and position."""
    all_rows: Tensor
    """(B, S) int64: those of all positions of the sequence, of which ranks that share it have parts."""
    queries: Tensor
    """(B, T") int64: those of the queries whose attention this rank computes: with heads over ranks, all of the sequence."""
    stream: Tensor
    """(B, T') int64: those of the positions of the residual stream that this rank holds. All, without tensor parallelism."""
    numbers: Tensor
    """(n,) int64: a number for each channel, head, and position of a key."""

    def of(self, layer: int) -> Drops:
        """The masks of one block; -1: of the embedding."""
        return self._replace(keys=self.keys[layer])


class WeightDrops(NamedTuple):
    """What determines which attention weights are dropped."""

    rate: float
    rows: Tensor
    """(B, T) int64, of the queries."""
    heads: Tensor
    """(H,) int64"""
    columns: Tensor
    """(S,) int64, of the keys."""


def new_seed() -> Tensor:
    """The seed of a micro-batch: a scalar int64 from the CPU's generator, which `StepSeed` seeds."""
    return torch.randint(2**62, (), dtype=torch.int64, device="cpu")


def make_drops(seed: Tensor, *, layers: int, batch: int, positions: Tensor, width: int) -> Drops:
    """The masks of a micro-batch. Nothing waits for the device.

    Args:
        seed: scalar int64, from 0 on.
        layers: L of the whole model.
        positions: (T,) int64: the places in the sequence of the positions that this rank holds, on its device.
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
        drops: of the block. None: not in training.
        site: index in `SITES`.
        stream: x has the positions of the residual stream on this rank; False: all of the sequence on this rank.
        first: number of the first channel, if x is a part of the channels.
    """
    if drops is None or rate == 0:
        return x
    rows = drops.stream if stream else drops.rows
    return _Drop.apply(x, rows, drops.keys[site], drops.numbers[first : first + x.size(-1)], rate)


def drop_weights(drops: Drops | None, rate: float, heads: int, keys: int, *, first_head: int = 0) -> WeightDrops | None:
    """The dropout of attention weights of a block; None without.

    Args:
        heads: number of query heads on this rank, from `first_head` on.
        keys: S, from the first position of the sequence on.
    """
    if drops is None or rate == 0:
        return None
    of_heads = drops.numbers[first_head : first_head + heads] ^ drops.keys[SITES.index("attention.weights")]
    return WeightDrops(rate, drops.queries, of_heads, drops.numbers[:keys])


class DropsInputs(nn.Linear):
    """A linear layer that drops inputs: its forward takes `drops`, too."""

    def merged(self) -> Tensor:
        """(o, i): the matrix that it applies where nothing is dropped."""
        raise NotImplementedError


def apply_linear(layer: nn.Module, x: Tensor, drops: Drops | None) -> Tensor:
    """A linear layer of a block, which may drop inputs: (B, T, i) → (B, T, o)."""
    return layer(x, drops=drops) if isinstance(layer, DropsInputs) else layer(x)


def kept(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """(…, n) bool: which values are kept.

    Args:
        rows: (…) int64, hashed by `hashed`.
        columns: (n,) int64.
    """
    return rows[..., None] * columns >= round(rate * 2**64) - 2**63  # products wrap around


def hashed(rows: Tensor, key: Tensor) -> Tensor:
    """Numbers of rows at a site: int64 of the broadcast shape."""
    return _mix(rows ^ key)


class _Drop(Function):
    """The gradient is dropped as the values are. Only what all sites share is saved."""

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
    """Random 64-bit numbers from small ones."""
    return _mix(_mix(x + _B))

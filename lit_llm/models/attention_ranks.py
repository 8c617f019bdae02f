"""Collectives for attention of ranks that share a sequence (context parallelism).

`SequenceShard.kind` gather: every rank gathers all keys and values. So all features of `attend` work: windows, documents,
grouped queries. Latent attention gathers the latents, B·T·(kv_rank + rope_head_dim) values, and computes keys and values
from them. Kind heads: one all-to-all gives each rank all positions of H / n heads, and another all-to-all sends the outputs
back to the ranks of their positions (Jacobs et al. 2023, arXiv 2309.14509). A rank sends (n - 1) / n of 2·B·T·K·h values in
each layer with gather, or of 2·B·T·(H + K)·h / n values with heads. The backward pass sends as many values again.

Shape letters: B sequences, T positions, n ranks, t = T / n positions of a rank, H query heads, K key/value heads, h head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_llm.core._torch import all_gather_rows, exchange_rows
from lit_llm.models.sequence_shard import SequenceShard


def gather_sequence(x: Tensor, shard: SequenceShard) -> Tensor:
    """Gather the positions of all ranks, t of each, in the order of the sequence of T positions: (B, K, t, h) → (B, K, T, h).

    The backward pass is a reduce-scatter: an exchange in the tensor's dtype, with sums in fp32.
    """
    gathered: Tensor = _GatherSequence.apply(x, shard)
    return gathered


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        mine = torch.stack(x.chunk(len(shard.chunks), dim=2))  # (chunks, B, K, c, h)
        rows = all_gather_rows(mine, shard.ranks, shard.group).unbind()
        numbers = shard.chunks_by_rank
        return torch.cat([rows[numbers.index(i)] for i in range(len(numbers))], dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shard = ctx.shard
        parts = gradient.chunk(shard.multiple, dim=2)
        sent = torch.stack([parts[i] for i in shard.chunks_by_rank])  # (n · chunks, B, K, c, h)
        received = exchange_rows(sent, shard.ranks, shard.group).unflatten(0, (shard.ranks, -1))  # (n, chunks, …)
        # Each rank has rounded its part to the compute dtype. The sum is rounded once more, whatever the number of ranks.
        total = received.sum(dim=0, dtype=torch.promote_types(received.dtype, torch.float32)).to(received.dtype)
        return torch.cat(total.unbind(), dim=2), None  # (B, K, t, h)


def attend_by_heads(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard) -> Tensor:
    """Attention in which each of n ranks computes H / n heads over all T positions. Takes and returns this rank's t = T / n
    positions of all heads: queries (B, H, t, h), keys and values (B, K, t, h) → (B, H, t, h).

    Args:
        attend: the function that computes this rank's heads, (B, H / n, T, h), (B, K / n, T, h) twice → (B, H / n, T, h).
    """
    n = shard.ranks
    sizes = [x.size(1) // n for x in (q, k, v)]
    sent = torch.cat([x.unflatten(1, (n, -1)) for x in (q, k, v)], dim=2).movedim(1, 0)  # (n, B, (H + 2K) / n, t, h)
    received = _Exchange.apply(sent, shard)  # rows are ranks' positions
    whole = received.movedim(0, 2).flatten(2, 3)  # (B, (H + 2K) / n, T, h)
    y = attend(*whole.split(sizes, dim=1))
    returned = _Exchange.apply(y.unflatten(2, (n, -1)).movedim(2, 0), shard)  # (n, B, H / n, t, h), rows are ranks' heads
    return returned.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Sends row i of `rows`, (n, …), to rank i; row i of the result comes from rank i. Gradients are sent back likewise."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        return exchange_rows(rows, shard.ranks, shard.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return exchange_rows(gradient, ctx.shard.ranks, ctx.shard.group), None

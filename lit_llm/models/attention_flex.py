"""FlexAttention (CUDA): a block mask for each batch, and the call of the compiled kernel.

The block mask is computed from the windows and documents of blocks of positions, so no T×T mask exists at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128  # positions


def make_block_mask(window: int | None, documents: Tensor | None, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Make FlexAttention's mask for causal attention of the last `queries` of `keys` positions.

    Args:
        documents: (B, keys) document numbers, which never decrease along a sequence. None: one document.
    """
    before = keys - queries
    # Positions of the first and last query of each block of queries, (m,), and of keys, (n,). The last block may be shorter.
    first_query, first_key = (torch.arange(start, keys, BLOCK, device=device) for start in (before, 0))
    last_query, last_key = ((first + BLOCK - 1).clamp(max=keys - 1) for first in (first_query, first_key))
    some = first_key[None, :] <= last_query[:, None]  # (m, n): a query of block i sees a key of block j
    # (m, n): each query sees each key. As in create_block_mask, a shorter block is not full.
    full = (last_key[None, :] <= first_query[:, None]) & (first_query + BLOCK <= keys)[:, None]
    full = full & (first_key + BLOCK <= keys)[None, :]
    if window is not None:
        some = some & (first_query[:, None] - last_key[None, :] < window)
        full = full & (last_query[:, None] - first_key[None, :] < window)
    some, full = some[None], full[None]  # (1, m, n)
    if documents is not None:
        some = some & (documents[:, last_key][:, None, :] >= documents[:, first_query][:, :, None])
        full = full & (documents[:, first_key][:, None, :] == documents[:, last_query][:, :, None])
    return BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(window, documents, before),
        seq_lengths=(queries, keys),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Count and list the key blocks that each query block needs, from `chosen` (B, m query blocks, n key blocks), bool.

    Return the number of chosen key blocks (B, 1, m), and the indices of all n, the chosen ones first (B, 1, m, n).
    """
    order = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _mask_mod(window: int | None, documents: Tensor | None, before: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query + before
        seen = key <= query
        if window is not None:
            seen = seen & (query - key < window)
        if documents is not None:
            seen = seen & (documents[b, query] == documents[b, key])
        return seen

    return allowed


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute attention by FlexAttention; arguments and result as in `attention.attend`. `block_mask`: window and documents."""
    grouped = q.size(1) != k.size(1)
    score_mod = None if softcap is None else partial(_capped, softcap)
    call = partial(_kernel(), q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=grouped)
    if sinks is None:
        return call()
    out, auxiliary = call(return_aux=AuxRequest(lse=True))
    # exp(lse) / (exp(lse) + exp(sink)): the share of the softmax that the sink leaves.
    return out * torch.sigmoid(auxiliary.lse - sinks.to(auxiliary.lse.dtype)[:, None])[..., None].to(out.dtype)


def _capped(softcap: float, score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return softcap * torch.tanh(score / softcap)


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., Any]:
    # Without torch.compile, FlexAttention computes all T×T scores.
    return torch.compile(flex_attention)

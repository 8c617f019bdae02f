"""Causal attention within a window and within documents, by the kernel that `attention_kernel_choice` names.

Shape letters: B sequences, T queries, S keys, H query heads, K key/value heads, h ``head_dim``, w width of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lit_llm.models.attention_blocks import block_attention
from lit_llm.models.attention_kernel_choice import AttentionKernel, choose
from lit_llm.models.attention_ranks import attend_by_heads, gather_sequence
from lit_llm.models.config import GPTConfig
from lit_llm.models.dropout import WeightDrops
from lit_llm.models.sequence_shard import SequenceShard

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, eq=False)
class Visibility:
    """Record that says which keys a position attends to: those of itself and earlier positions in its window and document."""

    window: int | None = None
    """A position sees itself and the window - 1 positions before it. None: all earlier positions."""
    documents: Tensor | None = None
    """(B, S) document numbers, which never decrease along a sequence. None: one document."""
    kernel: AttentionKernel = "auto"
    """The recipe's setting `compute.attention`, from which `choose` derives the kernel that runs."""
    block_mask: BlockMask | None = None
    """`window` and `documents` as FlexAttention's mask, made once a batch. None: FlexAttention does not run."""
    shard: SequenceShard | None = None
    """How ranks share the sequence: `attend` gets queries, keys and values of this rank's positions only. None: ranks do not
    share the sequence, or the caller of `attend` has gathered all keys and values (see `chunks`)."""
    chunks: tuple[tuple[slice, Visibility], ...] = ()
    """Empty unless ranks share the sequence by `SequenceShard.kind` gather. For each chunk of this rank's queries: the slice of
    the sequence whose keys the chunk needs, and the visibility of these keys."""


def visibilities(
    config: GPTConfig,
    input_ids: Tensor,
    documents: Tensor | None,
    kernel: AttentionKernel,
    *,
    cached: int,
    shard: SequenceShard | None = None,
) -> dict[int | None, Visibility]:
    """Return {window: `Visibility`} for each window that some layer has; None is the window of layers without one.

    Args:
        input_ids: (B, T) int64, the tokens of the queries. If ranks share the sequence, the tokens of all ranks.
        documents: (B, S) document numbers, which never decrease along a sequence. None: one document.
        cached: number of positions before the queries, whose keys the cache has.
        shard: how ranks share the sequence. None: each rank has whole sequences.
    """
    length, device = input_ids.size(1), input_ids.device
    caps, sinks = config.attention_softcap is not None, config.attention_sinks

    def of_keys(window: int | None, queries: int, keys: slice) -> Visibility:
        """Return the `Visibility` of the positions `keys` for queries at the last `queries` of these positions."""
        seen = None if documents is None else documents[:, keys]
        hides, block_mask = window is not None or seen is not None, None
        # Validation has no dropout, so FlexAttention may be the choice there although it is not in training.
        if cached == 0 and choose(kernel, device.type, hides=hides, caps=caps, sinks=sinks, drops=False) == "flex":
            from lit_llm.models.attention_flex import make_block_mask

            block_mask = make_block_mask(window, seen, queries, keys.stop - keys.start, device)
        return Visibility(window, seen, kernel, block_mask)

    by_window = {}
    for window in {config.layer(i).window for i in range(config.n_blocks)}:
        if shard is None or shard.kind == "heads":
            by_window[window] = replace(of_keys(window, length, slice(0, cached + length)), shard=shard)
        else:
            needed, size = [], length // shard.multiple
            for first in (chunk * size for chunk in shard.chunks):
                needed.append(slice(0 if window is None else max(0, first - window + 1), first + size))
            chunks = tuple((keys, of_keys(window, size, keys)) for keys in needed)
            by_window[window] = Visibility(window, documents, kernel, shard=shard, chunks=chunks)
    return by_window


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    see: Visibility,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    drops: WeightDrops | None = None,
) -> Tensor:
    """Attention of the last T of S positions: (B, H, T, h), (B, K, S, h), (B, K, S, w) → (B, H, T, w).

    Memory is O(T): scores and masks exist for small blocks only, in the forward and in the backward pass.

    Args:
        see: which keys each position sees.
        scale: factor of the scores. None: 1 / sqrt(h).
        softcap: c: scores become c * tanh(scores / c). None: no soft cap.
        sinks: (H,), a further logit for each head in the softmax's denominator, which has no value. None: no sinks.
        drops: the numbers from which the dropout mask of attention weights is computed. None: no weight is dropped.
    """
    if (width := v.size(-1)) != q.size(-1):
        # Flash kernels, `block_attention` and the exchange of heads need one width: zeros fill the narrower tensors.
        scale, widest = q.size(-1) ** -0.5 if scale is None else scale, max(width, q.size(-1))
        q, k, v = (F.pad(x, (0, widest - x.size(-1))) for x in (q, k, v))
        return attend(q, k, v, see=see, scale=scale, softcap=softcap, sinks=sinks, drops=drops)[..., :width]
    if see.shard is not None or see.chunks:
        attend_part = partial(attend, scale=scale, softcap=softcap)
        return _attend_with_ranks(q, k, v, see, sinks, drops, attend_part)
    hides = see.window is not None or see.documents is not None
    kernel = choose(
        see.kernel, q.device.type, hides=hides, caps=softcap is not None, sinks=sinks is not None, drops=drops is not None
    )
    grouped = q.size(1) != k.size(1)
    if kernel == "sdpa":
        plain = partial(F.scaled_dot_product_attention, q, k, v, scale=scale, enable_gqa=grouped)
        if q.size(2) == k.size(2):
            return plain(is_causal=True)
        if q.size(2) == 1:  # a single new position sees all keys
            return plain()
        # In fp32, torch's efficient kernel does not know groups, and torch would make a T×S mask.
        if q.device.type == "cuda" and (q.dtype in (torch.float16, torch.bfloat16) or not grouped):
            return plain(attn_mask=causal_lower_right(q.size(2), k.size(2)))
    scale = q.size(-1) ** -0.5 if scale is None else scale
    if kernel == "flex" and see.block_mask is not None:
        from lit_llm.models.attention_flex import attend_flex

        return attend_flex(q, k, v, see.block_mask, scale=scale, softcap=softcap, sinks=sinks)
    from_scores = softcap is not None or drops is not None or q.device.type != "cpu"
    rate, *hashes = (0.0, None, None, None) if drops is None else drops
    return block_attention(q, k, v, see.documents, sinks, *hashes, see.window, scale, softcap, rate, from_scores)[0]


def _attend_with_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    see: Visibility,
    sinks: Tensor | None,
    drops: WeightDrops | None,
    attend_part: Callable[..., Tensor],
) -> Tensor:
    """Compute `attend` for this rank's queries (B, H, T, h) and the keys of all ranks that share the sequence: (B, H, T, w).

    If `see.shard` is None, k and v have the positions of all ranks already. `attend_part` is `attend` with scale and soft cap.
    """
    shard = see.shard
    if shard is not None and shard.kind == "heads":
        see = replace(see, shard=None)
        if drops is not None:
            drops = drops._replace(heads=drops.heads.chunk(shard.ranks)[shard.rank])
        own = None if sinks is None else sinks.chunk(shard.ranks)[shard.rank]
        return attend_by_heads(partial(attend_part, see=see, sinks=own, drops=drops), q, k, v, shard)
    if shard is not None:
        k, v = gather_sequence(torch.cat((k, v), dim=1), shard).chunk(2, dim=1)  # one all-gather of both
    parts, size = [], q.size(2) // len(see.chunks)
    for (keys, sees), queries, first in zip(see.chunks, q.split(size, dim=2), range(0, q.size(2), size), strict=True):
        of_chunk = drops
        if drops is not None:
            of_chunk = drops._replace(rows=drops.rows[:, first : first + size], columns=drops.columns[keys])
        parts.append(attend_part(queries, k[:, :, keys], v[:, :, keys], see=sees, sinks=sinks, drops=of_chunk))
    return torch.cat(parts, dim=2)

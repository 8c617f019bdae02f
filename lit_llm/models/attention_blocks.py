"""Exact attention in blocks: windows and documents in O(T) memory, with gradients, as one operator.

The keys that a position sees are contiguous: from the start of its document, or of its window, to itself. So the queries are
cut into blocks, each with a range of keys. torch's flash kernel for CPUs computes a block. Soft caps, dropout and other devices
need `attention_scores`. Queries, keys, values, output and logsumexp are saved for the backward pass.

Shape letters: B sequences, H query heads, K key/value heads, T queries, S keys, h head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from lit_llm.core._torch import CPU_ATTENTION, CPU_ATTENTION_BACKWARD
from lit_llm.models.attention_scores import Scores, Slices, wide_dtype
from lit_llm.models.dropout import WeightDrops

BAND = 64  # queries of a block with a mask: smaller blocks take more calls, larger blocks compute more masked scores
SHORT = 32  # consecutive documents with up to this total number of positions share a block


@dataclass(frozen=True)
class Block:
    """Record of a block of attention: queries at positions first…end-1 of some sequences, which see only keys at start…end-1.

    Attributes:
        sequences: the rows of the batch.
        causal: queries and keys are the same positions, and each query sees all keys up to its own. False: the block needs a
            mask, unless it is one query that sees all keys of the block.
        shared: the block has, or may have, positions of several documents, so its mask must compare document numbers.
    """

    sequences: slice
    first: int
    end: int
    start: int
    causal: bool
    shared: bool = False

    def places(self, begin: int) -> tuple[Slices, Slices]:
        """Return the block's indices in the tensor of all queries (B, H, T, h), and in the tensor of all keys (B, K, S, h).
        `begin`: position of the first query among the S positions."""
        queries, keys = slice(self.first - begin, self.end - begin), slice(self.start, self.end)
        return (self.sequences, slice(None), queries), (self.sequences, slice(None), keys)

    def mask(self, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor:
        """Return the mask of allowed attention: bool (queries, keys), or with documents (sequences, 1, queries, keys)."""
        offset = self.first - self.start
        allowed = torch.ones(self.end - self.first, self.end - self.start, dtype=torch.bool, device=device).tril_(offset)
        if window is not None:
            allowed.triu_(offset - window + 1)
        if documents is None:
            return allowed
        seen, asking = documents[self.sequences, self.start : self.end], documents[self.sequences, self.first : self.end]
        return allowed & (asking[:, :, None] == seen[:, None, :])[:, None]


def blocks(
    batch: int, queries: int, keys: int, window: int | None, documents: Tensor | None, *, flash: bool
) -> Iterator[Block]:
    """Cut the last `queries` of `keys` positions into blocks, and yield the blocks.

    Args:
        documents: (B, S) document numbers. On the CPU, blocks end where documents end. On an accelerator, blocks do not,
            because the host would wait for the device to read the numbers; nor for a single query, because a mask is cheaper:
            all blocks are then `shared`. None: one document.
        flash: whether the flash kernel computes the blocks. It skips keys that causality hides, so causal blocks may be long.
    """
    first = keys - queries
    if documents is None or documents.device.type != "cpu" or queries == 1:
        for block in _run(slice(0, batch), 0, keys, first, window, flash=flash):
            yield replace(block, shared=documents is not None)
        return
    for sequence in range(batch):
        rows = slice(sequence, sequence + 1)
        ends = (documents[sequence].diff().nonzero().flatten() + 1).tolist()
        start = short = 0  # first position of the document, and of the short documents before it, which share a block
        for end in [*ends, keys]:
            if end - short > SHORT:
                if short < start:
                    yield from _merged(rows, short, start, first)
                short = start
            if end - start > SHORT:
                yield from _run(rows, start, end, first, window, flash=flash)
                short = end
            start = end
        if short < keys:
            yield from _merged(rows, short, keys, first)


def _merged(sequences: slice, start: int, end: int, first: int) -> Iterator[Block]:
    if end > first:
        yield Block(sequences, max(start, first), end, start, causal=False, shared=True)


def _run(sequences: slice, start: int, end: int, first: int, window: int | None, *, flash: bool) -> Iterator[Block]:
    """Yield the blocks of the queries at positions start…end-1, which see no key before `start`. Positions before `first` have
    no queries."""
    a = max(start, first)
    if flash and a == start:
        b = end if window is None else min(end, start + window)  # for these queries the window hides no key
        yield Block(sequences, a, b, start, causal=True)
        a = b
    while a < end:
        b = min(a + BAND, end)
        yield Block(sequences, a, b, start if window is None else max(start, a - window + 1), causal=False)
        a = b


def _masked(
    q: Tensor, k: Tensor, window: int | None, documents: Tensor | None, like: Tensor, *, flash: bool
) -> Iterator[tuple[Slices, Slices, bool, Tensor | None]]:
    """Yield for each block (indices of its queries, indices of its keys, whether the block is causal, mask). The mask is None,
    or a tensor of 0 and -inf in the dtype of `like`, to be added to the scores."""
    last, size_of_last = like, None  # bands have equal masks
    for block in blocks(q.size(0), q.size(2), k.size(2), window, documents, flash=flash):
        mask, size = None, (block.end - block.first, block.end - block.start)
        if not block.causal and (block.shared or size[0] > 1):  # a single query of one document sees all its keys
            if block.shared or size != size_of_last:
                allowed = block.mask(window, documents if block.shared else None, like.device)
                last = like.new_zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
                size_of_last = None if block.shared else size
            mask = last
        yield *block.places(k.size(2) - q.size(2)), block.causal, mask


def forward_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    rows: Tensor | None,
    head_numbers: Tensor | None,
    columns: Tensor | None,
    window: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    from_scores: bool,
) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, H, T, h) and the logsumexp (B, H, T) of the scores. Arguments as in `attention.attend`.

    Args:
        rows, head_numbers, columns: the tensors of a `dropout.WeightDrops` whose rate is `dropout`. None: nothing is dropped.
        from_scores: compute each block from its scores in plain torch (`attention_scores`), not by the flash kernel for CPUs.
    """
    batch, heads, length, width = q.shape
    q, k, v = _rows_are_dense(q), _rows_are_dense(k), _rows_are_dense(v)
    # The memory is laid out as (B, T, H, h), as in torch's kernels: joining the heads is then a view.
    out = q.new_empty(batch, length, heads, width).transpose(1, 2)
    logsumexp = torch.empty(batch, heads, length, dtype=wide_dtype(q), device=q.device)
    scores = _scores(rows, head_numbers, columns, scale, softcap, dropout) if from_scores else None
    like = logsumexp if from_scores else q
    for queries, keys, causal, mask in _masked(q, k, window, documents, like, flash=not from_scores):
        if scores is None:
            y, lse = CPU_ATTENTION(q[queries], k[keys], v[keys], 0.0, causal, attn_mask=mask, scale=scale)
        else:
            y, lse = scores.forward(q[queries], k[keys], v[keys], mask, (queries, keys))
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            y, lse = y * (lse - with_sink).exp()[..., None], with_sink
        out[queries], logsumexp[queries] = y, lse
    return out, logsumexp


def backward_in_blocks(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    rows: Tensor | None,
    head_numbers: Tensor | None,
    columns: Tensor | None,
    window: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    from_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks (empty without sinks). Arguments as in `forward_in_blocks`.

    A sink only enlarges the logsumexp, so the kernels of the blocks do not get the sinks.
    """
    q, k, v, gradient = _rows_are_dense(q), _rows_are_dense(k), _rows_are_dense(v), _rows_are_dense(gradient)
    q_gradient = _empty_like_heads(q, q.dtype)
    # Several blocks add to the gradient of one key. The sums are in the wide type, so that no precision is lost.
    k_gradient, v_gradient = _empty_like_heads(k, wide_dtype(k)).zero_(), _empty_like_heads(v, wide_dtype(v)).zero_()
    scores = _scores(rows, head_numbers, columns, scale, softcap, dropout) if from_scores else None
    like = logsumexp if from_scores else q
    for queries, keys, causal, mask in _masked(q, k, window, documents, like, flash=not from_scores):
        tensors = gradient[queries], q[queries], k[keys], v[keys], out[queries], logsumexp[queries]
        if scores is None:
            gradients = CPU_ATTENTION_BACKWARD(*tensors, 0.0, causal, attn_mask=mask, scale=scale)
        else:
            gradients = scores.backward(*tensors, mask, (queries, keys))
        q_gradient[queries] = gradients[0]
        k_gradient[keys] += gradients[1]
        v_gradient[keys] += gradients[2]
    sink_gradient = q.new_empty(0)
    if sinks is not None:
        share = (sinks.to(logsumexp.dtype)[:, None] - logsumexp).exp()  # (B, H, T): probability of the sink
        moved = (gradient.to(logsumexp.dtype) * out).sum(-1)
        sink_gradient = -(share * moved).sum((0, 2)).to(sinks.dtype)
    return q_gradient, k_gradient.to(k.dtype), v_gradient.to(v.dtype), sink_gradient


def _scores(
    rows: Tensor | None, heads: Tensor | None, columns: Tensor | None, scale: float, softcap: float | None, dropout: float
) -> Scores:
    if rows is None or heads is None or columns is None:
        return Scores(scale, softcap, None)
    return Scores(scale, softcap, WeightDrops(dropout, rows, heads, columns))


def _rows_are_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised (B, heads, T, h) tensor that is (B, T, heads, h) in memory."""
    batch, heads, length, width = x.shape
    return torch.empty(batch, length, heads, width, dtype=dtype, device=x.device).transpose(1, 2)


# Custom operators, so that compiled graphs, recomputation and memory traces see one operator.
block_attention = torch.library.custom_op("lit_llm::attention", forward_in_blocks, mutates_args=())
block_attention_backward = torch.library.custom_op("lit_llm::attention_backward", backward_in_blocks, mutates_args=())


@block_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, documents, sinks, *settings):  # type: ignore[no-untyped-def]
    return _empty_like_heads(q, q.dtype), torch.empty(q.shape[:3], dtype=wide_dtype(q), device=q.device)


@block_attention_backward.register_fake
def _(gradient, q, k, v, out, logsumexp, documents, sinks, *settings):  # type: ignore[no-untyped-def]
    gradients = [_empty_like_heads(x, x.dtype) for x in (q, k, v)]
    return *gradients, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, documents, sinks, rows, head_numbers, columns, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, documents, sinks, rows, head_numbers, columns)


def _backward(ctx, gradient, _):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them at each access
    *gradients, of_sinks = block_attention_backward(gradient, *saved, *ctx.settings)
    return *gradients, None, None if saved[6] is None else of_sinks, *(None,) * 8


block_attention.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.lit_llm.attention)
def _(q, k, v, documents, sinks, rows, head_numbers, columns, window, *_, **__):  # type: ignore[no-untyped-def]
    """Return the FLOPs of the forward pass, given shapes instead of tensors. Each query is counted with `window` keys (None:
    all keys), because the lengths of documents are unknown."""
    return sdpa_flop_count(q, _met(k, window), _met(v, window))


@register_flop_formula(torch.ops.lit_llm.attention_backward)
def _(gradient, q, k, v, out, logsumexp, documents, sinks, rows, head_numbers, columns, window, *_, **__):  # type: ignore[no-untyped-def]
    return sdpa_backward_flop_count(gradient, q, _met(k, window), _met(v, window))


def _met(shape: torch.Size, window: int | None) -> tuple[int, ...]:
    return *shape[:2], shape[2] if window is None else min(shape[2], window), shape[3]

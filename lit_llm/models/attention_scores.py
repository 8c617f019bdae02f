"""Attention of one block of queries from its scores, in plain torch: soft caps and dropout of attention weights, on any device.

The scores exist for one block and a part of the heads at a time. The backward pass computes scores and dropout masks again.

Shape letters: B sequences, H query heads, K key/value heads, T queries and S keys of the block, h head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_llm.models.dropout import WeightDrops, hashed, kept

Slices = tuple[slice, slice, slice]
"""Indices of sequences, heads and positions."""
ELEMENTS = 2**21  # approximate number of scores in memory at a time: 8 MB in fp32


class Scores:
    """Computes attention of one block of queries at a time. Stores the settings scale, soft cap and dropout, but no results."""

    def __init__(self, scale: float, softcap: float | None, drops: WeightDrops | None) -> None:
        self.scale, self.softcap, self.drops = scale, softcap, drops

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, block: tuple[Slices, Slices]
    ) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, T, h) and the logsumexp (B, H, T) of one block.

        Args:
            mask: 0 or -inf, added to the scores. None: each query sees all keys of the block.
            block: indices of the block's queries and of its keys in all queries and keys; they select the dropout numbers.
        """
        out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide_dtype(q))
        for heads, groups in _parts(q, k):
            weights = self._capped(self._products(q[:, heads], k[:, groups]))
            weights = weights if mask is None else weights.add_(mask)
            lse = weights.logsumexp(-1, keepdim=True)
            weights = weights.sub_(lse).exp_()
            if (keep := self._keep(weights, heads, block)) is not None:
                weights = weights.mul_(keep)
            out[:, heads] = _times(weights, v[:, groups].to(weights.dtype))
            logsumexp[:, heads] = lse[..., 0]
        return out, logsumexp

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        mask: Tensor | None,
        block: tuple[Slices, Slices],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values of one block, in fp32 (fp64 for fp64 tensors)."""
        gradients = [torch.empty_like(x, dtype=wide_dtype(x)) for x in (q, k, v)]
        for heads, groups in _parts(q, k):
            capped = self._capped(self._products(q[:, heads], k[:, groups]))
            weights = capped if mask is None else capped + mask
            weights = (weights - logsumexp[:, heads, :, None]).exp_()
            dy = gradient[:, heads].to(weights.dtype)
            moved = (dy * out[:, heads]).sum(-1, keepdim=True)  # the sum over keys of weight times its gradient
            of_weights = _times(dy, v[:, groups].to(dy.dtype).transpose(-1, -2))
            keep = self._keep(weights, heads, block)
            used = weights if keep is None else weights * keep
            if keep is not None:
                of_weights.mul_(keep)
            gradients[2][:, groups] = _summed(used, dy, v.size(1), q.size(1))
            of_scores = of_weights.sub_(moved).mul_(weights)
            if self.softcap is not None:
                of_scores.mul_(1 - (capped / self.softcap).square_())
            of_scores.mul_(self.scale)
            gradients[0][:, heads] = _times(of_scores, k[:, groups].to(dy.dtype))
            gradients[1][:, groups] = _summed(of_scores, q[:, heads].to(dy.dtype), k.size(1), q.size(1))
        return gradients[0], gradients[1], gradients[2]

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        return _times(q.to(wide_dtype(q)) * self.scale, k.to(wide_dtype(k)).transpose(-1, -2))

    def _capped(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def _keep(self, weights: Tensor, heads: slice, block: tuple[Slices, Slices]) -> Tensor | None:
        """Return the dropout factors of attention weights (B, H, T, S), 0 or 1 / (1 - rate); None if nothing is dropped."""
        if self.drops is None:
            return None
        (sequences, _, queries), (_, _, keys) = block
        rows = hashed(self.drops.rows[sequences, None, queries], self.drops.heads[heads, None])  # (B, H, T)
        return kept(rows, self.drops.columns[keys], self.drops.rate).to(weights.dtype).div_(1 - self.drops.rate)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which scores and sums of `x` are computed: fp64 if `x` is fp64, otherwise fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut the heads into parts with at most about `ELEMENTS` scores: yield (slice of query heads, of their key/value heads)."""
    group = q.size(1) // k.size(1)
    step = max(1, ELEMENTS // max(1, q.size(0) * group * q.size(2) * k.size(2)))  # a batch may be empty
    for first in range(0, k.size(1), step):
        end = min(first + step, k.size(1))
        yield slice(first * group, end * group), slice(first, end)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a (B, H, T, n) by b (B, K, n, m), where each group of H / K heads shares a matrix of b: (B, H, T, m)."""
    batch, heads, rows, _ = a.shape
    grouped = a.reshape(batch, b.size(1), heads // b.size(1) * rows, a.size(-1))
    return _product(grouped, b).view(batch, heads, rows, b.size(-1))


def _summed(a: Tensor, b: Tensor, groups: int, heads: int) -> Tensor:
    """Multiply the transpose of a (B, H, T, n) by b (B, H, T, m), and sum over each group of H / K heads: (B, K, n, m)."""
    size = heads // groups
    a, b = (x.reshape(x.size(0), x.size(1) // size, size * x.size(2), x.size(-1)) for x in (a, b))
    return _product(a.transpose(-1, -2), b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # autocast would round scores and weights to bf16
        return a @ b

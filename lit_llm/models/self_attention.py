"""Causal self-attention: projections, norms and rotary embedding around `attention.attend`.

Shape letters: B sequences, T positions in the input, S positions in the keys, d ``n_embd``, H query heads, K key/value heads,
h ``head_dim``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_llm.core.dtensor import local_part
from lit_llm.models.attention import Visibility, attend
from lit_llm.models.cache import LayerCache
from lit_llm.models.config import GPTConfig
from lit_llm.models.dropout import Drops, apply_linear, drop_weights
from lit_llm.models.rotary import Rotation, rotate
from lit_llm.models.short_convolution import ShortConvolution
from lit_llm.models.small_layers import make_rms_norm


class Attention(nn.Module):
    """Causal self-attention with H query heads, which share K key/value heads (grouped-query attention if K < H)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.resolved_head_dim
        self.dropout, self.scale, self.softcap = config.dropout, config.attention_scale, config.attention_softcap
        self.exclusive = config.exclusive_attention
        self.norm_heads = config.qk_norm_width == "head"
        self.first_head = 0  # the number of this rank's first query head
        self.score_probe: Callable[..., None] | None = None  # set by `HealthSignals` while it measures
        d, heads, kv = config.n_embd, config.n_head * self.head_dim, config.kv_heads * self.head_dim
        # Three matrices, not one fused matrix: Muon orthogonalises each, and tensor parallelism splits each by heads.
        self.query = nn.Linear(d, heads, bias=config.has_bias("qkv"))
        self.key = nn.Linear(d, kv, bias=config.has_bias("qkv"))
        self.value = nn.Linear(d, kv, bias=config.has_bias("qkv"))
        self.project = nn.Linear(heads, d, bias=config.has_bias("attention_output"))
        self.query_convolution = self.key_convolution = self.value_convolution = None
        if (positions := config.qkv_convolution) is not None:
            self.query_convolution = ShortConvolution(positions, heads)
            self.key_convolution = ShortConvolution(positions, kv)
            self.value_convolution = ShortConvolution(positions, kv)
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = make_rms_norm(config, self.head_dim if self.norm_heads else heads)
            self.key_norm = make_rms_norm(config, self.head_dim if self.norm_heads else kv)
        self.sinks = nn.Parameter(torch.empty(config.n_head)) if config.attention_sinks else None

    def forward(
        self, x: Tensor, rotation: Rotation | None, see: Visibility, cache: LayerCache | None, drops: Drops | None = None
    ) -> Tensor:
        """Apply attention: (B, T, d) → (B, T, d).

        Args:
            rotation: cos and sin of the rotary angles. None: no rotary embedding.
            see: which keys each position sees.
            cache: keys and values of the positions before x; extended in place. None: there are no earlier positions.
            drops: the numbers from which dropout masks are computed. None: nothing is dropped.
        """
        q, k, v = (apply_linear(layer, x, drops) for layer in (self.query, self.key, self.value))
        if self.query_convolution is not None and self.key_convolution is not None and self.value_convolution is not None:
            q = self.query_convolution(q, see.documents, cache, see.shard)
            k = self.key_convolution(k, see.documents, cache, see.shard)
            v = self.value_convolution(v, see.documents, cache, see.shard)
        q = self._heads(q, self.query_norm)  # (B, H, T, h)
        k = self._heads(k, self.key_norm)  # (B, K, T, h)
        v = self._heads(v, None)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast the norms return fp32; attention runs in the compute dtype
        if self.score_probe is not None:
            self.score_probe(q, k, scale=self.scale, window=see.window)
        own = v  # (B, K, T, h)
        if cache is not None:
            k, v = cache.append(k, v)
        keys = k.size(2) if see.shard is None else k.size(2) * see.shard.ranks
        y = attend(
            q,
            k,
            v,
            see=see,
            scale=self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else local_part(self.sinks),
            drops=drop_weights(drops, self.dropout, q.size(1), keys, first_head=self.first_head),
        )  # (B, H, T, h)
        if self.exclusive:
            y = without_own_value(y, own)
        return apply_linear(self.project, y.transpose(1, 2).flatten(2), drops)  # (B, T, H·h) → (B, T, d)

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Split queries, keys or values into heads, and apply `norm` if given: (B, T, heads·h) → (B, heads, T, h)."""
        if norm is not None and not self.norm_heads:
            x = norm(x)
        # The number of heads is inferred: under tensor parallelism each rank holds a part of the heads.
        x = x.unflatten(-1, (-1, self.head_dim))  # (B, T, heads, h)
        if norm is not None and self.norm_heads:
            x = norm(x)
        return x.transpose(1, 2)


def without_own_value(y: Tensor, v: Tensor) -> Tensor:
    """Remove from heads' outputs y (B, H, T, h) the component along the value vector v (B, K, T, h) of the same position."""
    grouped, v = y.unflatten(1, (v.size(1), -1)), v.unsqueeze(2)  # (B, K, H / K, T, h), (B, K, 1, T, h)
    part = _dot(grouped, v) / _dot(v, v).clamp(min=torch.finfo(torch.float32).tiny)  # (B, K, H / K, T)
    return torch.addcmul(grouped, part[..., None].to(y.dtype), v, value=-1).flatten(1, 2)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot product over the last dimension, (…, h) twice → (…), in fp32, because squares overflow in fp16."""
    if a.dtype == torch.float32:
        return torch.linalg.vecdot(a, b)  # the fastest on a CPU; autocast would compute it in the narrow type
    return (a.float() * b.float()).sum(-1)

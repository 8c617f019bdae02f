"""Causal self-attention, its rotary embedding and its cache.

Shape letters: B sequences, T positions in the input, S positions in the keys, d ``n_embd``, H query heads, K key/value heads,
h ``head_dim``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.models.config import GPTConfig


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, through torch's scaled_dot_product_attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.resolved_head_dim
        self.dropout = config.dropout
        d, heads, kv = config.n_embd, config.n_head * self.head_dim, config.kv_heads * self.head_dim
        qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
        # Three matrices, not one fused matrix: Muon orthogonalises each, and tensor parallelism splits each by heads.
        self.query = nn.Linear(d, heads, bias=qkv_bias)
        self.key = nn.Linear(d, kv, bias=qkv_bias)
        self.value = nn.Linear(d, kv, bias=qkv_bias)
        self.project = nn.Linear(heads, d, bias=config.bias)
        self.query_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """(B, T, d) → (B, T, d).

        Args:
            rotation: cos and sin of the rotary angles, (T, h/2) each. None: no rotary embedding.
            mask: bool, broadcastable to (B, H, T, S), True where attention is allowed. None: causal.
            cache: keys and values of the positions before these; extended in place.
        """
        batch, length, _ = x.shape
        # The number of heads is inferred (-1): under tensor parallelism each rank holds a part of them.
        q = self.query_norm(self.query(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)  # (B, H, T, h)
        k = self.key_norm(self.key(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)  # (B, K, T, h)
        v = self.value(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # (B, K, T, h)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast the norms return fp32; attention runs in the compute dtype
        if cache is not None:
            k, v = cache.append(k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and length > 1,  # a single new token attends to the whole cache
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.size(1) != k.size(1),
        )  # (B, H, T, h)
        return self.project(y.transpose(1, 2).reshape(batch, length, -1))  # (B, T, H·h) → (B, T, d)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021), half-split: the pair (i, i + h/2) is rotated by its position's angle.

    Args:
        x: (B, heads, T, h) queries or keys.
        cos, sin: (T, h/2) fp32.
    """
    first, second = x.chunk(2, dim=-1)  # (B, heads, T, h/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def scale_rope_frequencies(
    frequency: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Llama 3.1's rotary frequencies for a context `factor` times the original one (Grattafiori et al. 2024, released code).

    A frequency with more than `high_freq_factor` turns in the original context is kept. One with fewer than `low_freq_factor`
    turns is divided by `factor`. In between, the two are interpolated linearly in the number of turns.

    Args:
        frequency: (h/2,) radians per position.
    """
    turns = frequency * original_max_position_embeddings / (2 * math.pi)  # (h/2,)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


class LayerCache:
    """Keys and values of one layer, (B, K, capacity, h), filled from position 0."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, h) new keys and values; return all so far as (B, K, S, h) views."""
        if self.keys is None or self.values is None:
            shape = (k.size(0), k.size(1), self.capacity, k.size(3))
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        end = self.length + k.size(2)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """One `LayerCache` per block, and the token ids, so that generation computes each position once.

    Args:
        capacity: maximum number of positions. None: block_size, which is up to 131,072 in imported models.
    """

    def __init__(self, config: GPTConfig, capacity: int | None = None) -> None:
        self.layers = [LayerCache(config.block_size if capacity is None else capacity) for _ in range(config.n_layer)]
        self.seen_ids: Tensor | None = None

    @property
    def length(self) -> int:
        return self.layers[0].length

    def remember(self, input_ids: Tensor) -> Tensor:
        """Append (B, T) new ids; return all of them, (B, S)."""
        self.seen_ids = input_ids if self.seen_ids is None else torch.cat((self.seen_ids, input_ids), dim=1)
        return self.seen_ids

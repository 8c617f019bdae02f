"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): its settings are `latent_config.LatentConfig`.

Shape letters: B sequences, T positions in the input, S positions in the keys, d ``n_embd``, H heads, c ``kv_rank``, e
``query_rank``, n ``nope_head_dim``, r ``rope_head_dim``, v ``value_head_dim``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_llm.core.dtensor import differentiable_part
from lit_llm.models.attention import Visibility, attend
from lit_llm.models.attention_ranks import gather_sequence
from lit_llm.models.cache import LayerCache
from lit_llm.models.config import GPTConfig
from lit_llm.models.dropout import Drops, DropsInputs, apply_linear, drop_weights
from lit_llm.models.rotary import Rotation, rotate


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are projections of one latent of each position.

        latent = norm(W x)                                      cached in generation, with the rotary key
        key of a head = (rotated W x, shared by all heads; W latent),   value = W latent
        query of a head = (rotated W z; W z),   z = x, or norm(W x) with `query_rank`

    Each W is a matrix of its own. The rotated part comes first, as `rotate` takes it. Scores are scaled by 1 / sqrt(n + r) or
    `attention_scale`; in models with YaRN, mscale_all_dim m multiplies this by (0.1 m ln(factor) + 1)². `qkv_bias` applies to
    the projections from the residual stream to the latents and to the rotary key, as in DeepSeek's models.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.head_dim, self.rotated, self.value_dim = latent.head_dim, latent.rope_head_dim, latent.value_head_dim
        self.dropout, self.softcap = config.dropout, config.attention_softcap
        self.scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.first_head = 0  # the number of this rank's first head
        self.score_probe: Callable[..., None] | None = None  # set by `HealthSignals` while it measures
        d, heads, rank, bias = config.n_embd, config.n_head, latent.query_rank, config.has_bias("qkv")
        self.query_latent = self.query_latent_norm = None
        if rank is not None:
            self.query_latent = nn.Linear(d, rank, bias=bias)
            self.query_latent_norm = nn.RMSNorm(rank, eps=latent.norm_eps)
        self.query = nn.Linear(d if rank is None else rank, heads * self.head_dim, bias=False)
        self.latent = nn.Linear(d, latent.kv_rank, bias=bias)
        self.latent_norm = nn.RMSNorm(latent.kv_rank, eps=latent.norm_eps)
        self.rotary_key = nn.Linear(d, self.rotated, bias=bias)
        self.key = nn.Linear(latent.kv_rank, heads * latent.nope_head_dim, bias=False)
        self.value = nn.Linear(latent.kv_rank, heads * self.value_dim, bias=False)
        self.project = nn.Linear(heads * self.value_dim, d, bias=config.has_bias("attention_output"))

    def forward(
        self, x: Tensor, rotation: Rotation | None, see: Visibility, cache: LayerCache | None, drops: Drops | None = None
    ) -> Tensor:
        """Apply latent attention: (B, T, d) → (B, T, d). Other arguments as in `Attention.forward`.

        Args:
            cache: rotary keys and latents (B, 1, S, r + c) of the positions before x; extended in place.
        """
        z = x
        if self.query_latent is not None and self.query_latent_norm is not None:
            z = self.query_latent_norm(apply_linear(self.query_latent, x, drops))  # (B, T, e)
        q = self._heads(apply_linear(self.query, z, drops), self.head_dim)  # (B, H, T, r + n)
        shared = differentiable_part(apply_linear(self.rotary_key, x, drops))[:, None]  # (B, 1, T, r)
        latent = self.latent_norm(apply_linear(self.latent, x, drops))  # (B, T, c)
        if isinstance(latent, DTensor):  # the same on all ranks of tensor parallelism, and so is its gradient
            latent = latent.to_local()
        if rotation is not None:
            q, shared = rotate(q, *rotation), rotate(shared, *rotation)
        # Under autocast norms return fp32; latents are kept and sent in the compute dtype.
        kept = torch.cat((shared, latent.to(shared.dtype)[:, None]), dim=-1)  # (B, 1, T, r + c)
        if cache is not None:
            (kept,) = cache.append(kept)
            if kept.size(2) > q.size(2):
                return apply_linear(self.project, self._from_latents(q, kept, see), drops)
        keys = kept.size(2) if see.shard is None else kept.size(2) * see.shard.ranks
        weight_drops = drop_weights(drops, self.dropout, q.size(1), keys, first_head=self.first_head)
        of_keys = drops
        if see.shard is not None and see.shard.kind == "gather":
            kept, see = gather_sequence(kept, see.shard), replace(see, shard=None)
            of_keys = None if drops is None else drops._replace(rows=drops.all_rows)
        shared, latent = kept.split((self.rotated, kept.size(-1) - self.rotated), dim=-1)
        plain = self._heads(apply_linear(self.key, latent[:, 0], of_keys), self.head_dim - self.rotated)  # (B, H, S, n)
        v = self._heads(apply_linear(self.value, latent[:, 0], of_keys), self.value_dim)  # (B, H, S, v)
        k = torch.cat((shared.to(v.dtype).expand(-1, plain.size(1), -1, -1), plain), dim=-1)  # (B, H, S, r + n)
        q = q.to(v.dtype)
        if self.score_probe is not None:
            self.score_probe(q, k, scale=self.scale, window=see.window)
        y = attend(q, k, v, see=see, scale=self.scale, softcap=self.softcap, drops=weight_drops)  # (B, H, T, v)
        return apply_linear(self.project, y.transpose(1, 2).flatten(2), drops)  # (B, T, H·v) → (B, T, d)

    @property
    def of_latents(self) -> list[nn.Module]:
        """The layers whose outputs every head uses: projections to latents and to the rotary key, and the latents' norms."""
        layers = (self.query_latent, self.query_latent_norm, self.latent, self.latent_norm, self.rotary_key)
        return [module for module in layers if module is not None]

    def _heads(self, x: Tensor, width: int) -> Tensor:
        """Split into heads: (B, T, heads·width) → (B, heads, T, width). A tensor-parallel rank has a part of the heads."""
        return x.unflatten(-1, (-1, width)).transpose(1, 2)

    def _from_latents(self, q: Tensor, kept: Tensor, see: Visibility) -> Tensor:
        """Attend from few new positions without computing earlier keys and values: q (B, H, T, r + n) → (B, T, H·v).

        A score is q·(W latent) = (Wᵀ q)·latent, so all heads attend to the latents directly, and the projection to values is
        applied to the weighted sum of latents (section 2.1.2). This sum also contains the rotary keys, which are cut off.

        Args:
            kept: (B, 1, S, r + c), rotary keys and latents of all positions.
        """
        of_keys = _matrix(self.key).unflatten(0, (q.size(1), -1))  # (H, n, c)
        of_values = _matrix(self.value).unflatten(0, (q.size(1), -1))  # (H, v, c)
        rotated, plain = q.split((self.rotated, q.size(-1) - self.rotated), dim=-1)
        q = torch.cat((rotated.to(kept.dtype), (plain @ of_keys.to(plain.dtype)).to(kept.dtype)), dim=-1)  # (B, H, T, r + c)
        y = attend(q, kept, kept, see=see, scale=self.scale, softcap=self.softcap)[..., self.rotated :]  # (B, H, T, c)
        return (y @ of_values.to(y.dtype).mT).transpose(1, 2).flatten(2)


def _matrix(layer: nn.Linear) -> Tensor:
    return layer.merged() if isinstance(layer, DropsInputs) else layer.weight

"""Techniques of the ladder (`ladder.py`) that change the model or the loss.

`VariantGPT` implements the techniques that `GPTConfig` does not have. These can be combined, and most leave the initial model's
outputs unchanged. Their parameters are vectors (AdamW without decay) or `nn.Embedding`s (AdamW), see `parameter_groups`.

Shape letters: B sequences, T positions, d ``n_embd``, H query heads, h ``head_dim``, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from ladder_techniques import Technique
from torch import Tensor, nn

from lit_llm.models.attention import attend
from lit_llm.models.block import Block
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.gpt import GPT, View
from lit_llm.models.loss import LossSums, cross_entropy
from lit_llm.models.rotary import rotate
from lit_llm.models.self_attention import without_own_value
from lit_llm.models.short_convolution import ShortConvolution

CONVOLUTION = 4
"""Number of positions that a convolution reads."""
BIAS_RATE = 0.01


@dataclass(frozen=True)
class Variant:
    """The techniques of a model that `GPTConfig` does not have. TECHNIQUES has their sources."""

    value_embeddings: int = 0
    """Number of blocks, counted from the last, that add a token embedding to the values of attention."""
    earlier_embeddings: int = 0
    """Number of previous tokens whose embeddings, each from a further table, are added to a token's embedding."""
    bigrams: int = 0
    """Rows of a hashed embedding of (token, previous token), which is added to the token's embedding. 0: none."""
    shift: bool = False
    """Whether attention and MLP read, by channel, a learned mix of the inputs at a position and at the previous position."""
    convolutions: str = ""
    """Places of causal depthwise convolutions of 4 positions: "d" hidden values of the MLP, "e" embedding, "" none."""
    forget_gates: bool = False
    """Whether each head has a forget gate f_t at each position t: the score of query i and key j gets + Σ_{j<t≤i} log f_t."""
    key_offset: bool = False
    """Whether the slowly rotating half of each key is taken from the previous position."""


def before(x: Tensor, lag: int = 1) -> Tensor:
    """Shift x (B, T, …): position t gets the values of position t - `lag`, and the first `lag` positions get zeros."""
    return F.pad(x[:, :-lag], [0, 0] * (x.ndim - 2) + [lag, 0])


def new_convolution(channels: int) -> ShortConvolution:
    made = ShortConvolution(CONVOLUTION, channels)
    nn.init.zeros_(made.weight)
    return made


class VariantBlock(nn.Module):
    """A block with the techniques `v`, which uses the modules of the plain block `block`."""

    def __init__(self, block: Block, v: Variant, *, d: int, index: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        a = block.attention
        self.block, self.v = block, v
        self.heads = a.query.out_features // a.head_dim
        self.value_embedding = None
        if index >= layers - v.value_embeddings:
            self.value_embedding = nn.Embedding(vocabulary, a.value.out_features)
            nn.init.zeros_(self.value_embedding.weight)
        self.mix = nn.Parameter(torch.zeros(2 * d)) if v.shift else None
        self.conv_d = new_convolution(block.mlp.up.out_features) if "d" in v.convolutions else None
        # sigmoids of 1 … 5: gates that halve weights after 2 to 100 positions
        biases = torch.linspace(1, 5, self.heads)
        self.forget = nn.Parameter(torch.cat((torch.zeros(d * self.heads), biases))) if v.forget_gates else None

    def forward(self, x: Tensor, ids: Tensor, rotation: Any, see: Any) -> Tensor:
        block = self.block
        y = block.attention_norm(x)
        if self.mix is not None:
            y = y + self.mix.chunk(2)[0] * (before(y) - y)
        if block.attention_convolution is not None:
            y = block.attention_convolution(y)
        x = x + self.attention(y, ids, rotation, see)
        y = block.mlp_norm(x)
        if self.mix is not None:
            y = y + self.mix.chunk(2)[1] * (before(y) - y)
        if block.mlp_convolution is not None:
            y = block.mlp_convolution(y)
        if self.conv_d is None:
            return x + block.mlp(y)
        return x + block.mlp.project(block.mlp.activate(self.conv_d(block.mlp.up(y))))

    def attention(self, x: Tensor, ids: Tensor, rotation: Any, see: Any) -> Tensor:
        a = self.block.attention
        q, k, value = a.query(x), a.key(x), a.value(x)
        if a.query_convolution is not None:
            q, k, value = a.query_convolution(q), a.key_convolution(k), a.value_convolution(value)
        if self.value_embedding is not None:
            value = value + self.value_embedding(ids)
        q, k, value = a._heads(q, a.query_norm), a._heads(k, a.key_norm), a._heads(value, None)  # (B, H, T, h)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        if self.v.key_offset:
            half = k.size(-1) // 4
            # the second quarter of each half: the slow frequencies
            parts = list(k.split(half, dim=-1))
            for i in (1, 3):
                parts[i] = torch.cat((parts[i][:, :, :1], parts[i][:, :, :-1]), dim=2)
            k = torch.cat(parts, dim=-1)
        scale = a.head_dim**-0.5 if a.scale is None else a.scale
        if self.forget is not None:
            gates = x @ self.forget[: -self.heads].view(-1, self.heads) + self.forget[-self.heads :]  # (B, T, H)
            kept = F.logsigmoid(gates).cumsum(1).mT[..., None]  # (B, H, T, 1)
            # score q k + kept_i - kept_j: kept_i cancels in the softmax over j, and one more dimension of the keys adds -kept_j
            q, k = torch.cat((q, torch.ones_like(kept)), -1), torch.cat((k, -kept / scale), -1)
        y = attend(q, k, value, see=see, scale=scale, softcap=a.softcap)  # (B, H, T, h)
        if a.exclusive:
            y = without_own_value(y, value)
        return a.project(y.transpose(1, 2).flatten(2))


class VariantGPT(nn.Module):
    """A GPT with the techniques `v`."""

    def __init__(self, model: GPT, v: Variant) -> None:
        super().__init__()
        c = model.config
        self.model, self.v = model, v
        rows, d, n = c.padded_vocab_size, c.n_embd, c.n_layer
        self.rows = rows
        self.blocks = nn.ModuleList(
            VariantBlock(block, v, d=d, index=i, layers=n, vocabulary=rows) for i, block in enumerate(model.blocks)
        )
        self.earlier = nn.ModuleList(nn.Embedding(rows, d) for _ in range(v.earlier_embeddings))
        self.bigrams = nn.Embedding(v.bigrams, d) if v.bigrams else None
        for table in [*self.earlier, *([] if self.bigrams is None else [self.bigrams])]:
            nn.init.zeros_(table.weight)
        self.conv_e = new_convolution(d) if "e" in v.convolutions else None

    def embed(self, view: View) -> Tensor:
        v, model, ids = self.v, self.model, view.input_ids
        x = model.embed(view)
        for lag, table in enumerate(self.earlier, 1):
            x = x + before(table(ids), lag)
        if self.bigrams is not None:
            pair = (
                (ids * 36313 ^ before(ids) * 27191) % v.bigrams if self.rows**2 > v.bigrams else ids * self.rows + before(ids)
            )
            x = x + self.bigrams(pair)
        return x if self.conv_e is None else self.conv_e(x)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, *, loss: Any = None) -> Tensor | LossSums:
        model = self.model
        view = model.view(input_ids)
        x = self.embed(view)
        for i, block in enumerate(self.blocks):
            table = model.rotary_of[i]
            x = block(x, input_ids, None if table is None else view.rotations[table], view.sees[model.layers[i].window])
        return model.finish(x, view, targets, loss)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def variant(**settings: Any) -> Callable[[nn.Module], nn.Module]:
    """Return a function for `Technique.model` that sets the fields `settings` of the model's Variant."""

    def change(model: nn.Module) -> nn.Module:
        if isinstance(model, VariantGPT):
            return VariantGPT(model.model, replace(model.v, **settings))
        assert isinstance(model, GPT)
        return VariantGPT(model, Variant(**settings))

    return change


def zero_start(model: nn.Module) -> nn.Module:
    """Set the weights of short convolutions to zero, so that they begin as the identity (the default until 2026-11-27)."""
    for module in model.modules():
        if isinstance(module, ShortConvolution):
            nn.init.zeros_(module.weight)
    return model


def balanced(model: nn.Module) -> nn.Module:
    """Return `model` with a hook that moves the biases of the experts once for each batch, as `ExpertBalance` does."""

    def move(model: GPT, _: Any, sums: Tensor | LossSums) -> None:
        if model.training and isinstance(sums, LossSums) and sums.router is not None:
            for router, counts in zip(model.routers, sums.router.counts.double(), strict=True):
                router.choice_bias += BIAS_RATE * (counts.mean() - counts).sign()

    model.register_forward_hook(move)  # type: ignore[arg-type]
    return model


def experts(count: int) -> Technique:
    """Return the technique with `count` experts, 2 a token. Experts are half as wide as the dense MLP: equal FLOPs."""
    config = {"moe": lambda width: MoEConfig(experts=count, top_k=2, expert_width=2 * width)}
    return Technique(f"experts-{count}", "2 of them, half as wide; arXiv 2408.15664", config=config, model=balanced)


SPEED_RUN = "modded-nanogpt, github.com/KellerJordan/modded-nanogpt, record of"
TECHNIQUES = [
    Technique("half-rope", "half-truncated rotary embedding: modded-nanogpt; GPT-NeoX", config={"partial_rotary_factor": 0.5}),
    Technique("z-loss", "PaLM, arXiv 2204.02311, section 5", loss=partial(cross_entropy, z_loss=1e-4)),
    Technique("softcap", f"logit soft cap of 15: Gemma 2; {SPEED_RUN} 2025-01", config={"logit_softcap": 15.0}),
    Technique("rope-base", "rotary base of 500 for short contexts", config={"rope_theta": 500.0}),
    Technique("qkv-convolution", "Primer, arXiv 2109.08668; Canon-B, Allen-Zhu 2025", config={"qkv_convolution": 4}),
    Technique("input-convolutions", "Canon-A and -C, Allen-Zhu 2025", config={"input_convolution": 4}),
    Technique("conv-3", "3 positions instead of 4", config={"input_convolution": 3}),
    Technique("zero-start", "short convolutions that start at zero", model=zero_start),
    Technique("hidden-convolution", "Canon-D, Allen-Zhu 2025", model=variant(convolutions="d")),
    Technique("embedding-convolution", "as Canon layers, on the embedding", model=variant(convolutions="e")),
    Technique("token-shift", "RWKV, arXiv 2305.13048", model=variant(shift=True)),
    Technique("earlier-embeddings", "embeddings of the two tokens before", model=variant(earlier_embeddings=2)),
    Technique("bigrams", f"{SPEED_RUN} 2026-01", model=variant(bigrams=16_384)),
    Technique("bigrams-1024", "as bigrams, with fewer rows", model=variant(bigrams=1_024)),
    Technique("value-embeddings", f"{SPEED_RUN} 2024-12-04; arXiv 2410.17897", model=variant(value_embeddings=4)),
    Technique("exclusive", "exclusive self-attention, Zhai 2026", config={"exclusive_attention": True}),
    Technique("forget", "forgetting transformer, arXiv 2503.02130", model=variant(forget_gates=True)),
    Technique("key-offset", f"{SPEED_RUN} 2025-12", model=variant(key_offset=True)),
    *map(experts, (4, 8, 16)),
    Technique("ahead-1", "multi-token prediction with a block, DeepSeek-V3, arXiv 2412.19437", config={"predict_ahead": 1}),
]

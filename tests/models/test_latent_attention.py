"""Latent attention against its formula in float64 with a naive softmax, and generation from latents."""

import math

import pytest
import torch

from lit_llm.models.attention_kernel_choice import AttentionKernel
from lit_llm.models.cache import KVCache
from lit_llm.models.generation import Sampling, generate
from lit_llm.models.gpt import GPT, GPTConfig, reset_adapters
from lit_llm.models.latent_config import LatentConfig
from lit_llm.models.lora import LoRAConfig, apply_lora

LATENT = {"kv_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 5}
HEADS, WIDTH = 3, 14


def model_of(query_rank=None, **settings):
    torch.manual_seed(0)
    latent = LatentConfig(**{**LATENT, "query_rank": query_rank, **settings.pop("latent", {})})
    size = {"n_layer": 2, "n_head": HEADS, "n_embd": WIDTH, "block_size": 40, "vocab_size": 31, "qk_norm": False}
    model = GPT(GPTConfig(**size, latent=latent, zero_init_projections=False, init_std=0.5, **settings)).double().eval()
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


def rms(x, gain, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def turned(x, position, theta):
    """Rotate pairs (i, i + r/2) of one vector by its position's angles."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def formula(weights, x, positions, hidden, config):
    """Section 2.1 of arXiv 2405.04434 for one sequence (T, d), head by head: latents, both parts, softmax, output.

    Also the largest score that is not hidden, before a soft cap.
    """
    largest = []
    latent, length = config.latent, len(x)
    n, r, v = latent.nope_head_dim, latent.rope_head_dim, latent.value_head_dim
    z = x
    if latent.query_rank is not None:
        z = rms(x @ weights["query_latent.weight"].T, weights["query_latent_norm.weight"], latent.norm_eps)
    c = rms(x @ weights["latent.weight"].T, weights["latent_norm.weight"], latent.norm_eps)
    shared = x @ weights["rotary_key.weight"].T
    shared = torch.stack([turned(shared[t], positions[t], config.rope_theta) for t in range(length)])
    heads = []
    for head in range(config.n_head):
        rows = weights["query.weight"][head * (r + n) : (head + 1) * (r + n)]
        rotated = torch.stack([turned(z[t] @ rows[:r].T, positions[t], config.rope_theta) for t in range(length)])
        keys = c @ weights["key.weight"][head * n : (head + 1) * n].T
        scores = rotated @ shared.T + (z @ rows[r:].T) @ keys.T
        scores = scores * (config.attention_scale or 1 / math.sqrt(n + r))
        largest.append(float(scores.detach().masked_fill(hidden, -torch.inf).max()))
        if config.attention_softcap:
            scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
        values = c @ weights["value.weight"][head * v : (head + 1) * v].T
        heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
    return torch.cat(heads, dim=1) @ weights["project.weight"].T, max(largest)


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        ({}, "auto"),
        ({"query_rank": 7}, "blocks"),
        ({"query_rank": 7, "window": 5, "mask_documents": True, "eos_id": 3}, "auto"),
        ({"attention_softcap": 2.0, "attention_scale": 0.7}, "auto"),
        ({"latent": {"value_head_dim": 13}}, "auto"),  # wider than the keys
    ],
)
def test_attention_equals_its_formula_in_float64(settings, kernel: AttentionKernel):
    model = model_of(**settings)
    model.attention_kernel = kernel
    ids = torch.randint(0, 31, (1, 30), generator=torch.Generator().manual_seed(1))
    config = model.config
    for table in model.rotary:  # which are in fp32
        angles = torch.outer(torch.arange(40).double(), config.rope_theta ** (-torch.arange(2).double() / 2))[None]
        table.cos, table.sin = angles.cos(), angles.sin()
    view = model.view(ids)
    x = torch.randn(1, 30, WIDTH, dtype=torch.float64, requires_grad=True)
    attention = model.blocks[0].attention
    documents = (ids[0] == 3).cumsum(0) if config.mask_documents else torch.zeros(30)
    i = torch.arange(30)
    hidden = (i[None] > i[:, None]) | (documents[None] != documents[:, None])
    if config.window is not None:
        hidden |= i[:, None] - i[None] >= config.window
    starts = [int((documents == number).nonzero()[0]) for number in documents]
    weights = dict(attention.named_parameters())
    expected, largest = formula(weights, x[0], [t - start for t, start in enumerate(starts)], hidden, config)
    found = attention(x, view.rotations[0], view.sees[config.window], None)[0]
    seen = []
    attention.score_probe = lambda q, k, *, scale, window: seen.append(
        (q @ k.mT)[0].masked_fill(hidden, -torch.inf).max() * scale
    )
    attention(x.detach(), view.rotations[0], view.sees[config.window], None)
    assert float(seen[0]) == pytest.approx(largest, rel=1e-12)
    weight = torch.randn(30, WIDTH, dtype=torch.float64)
    inputs = [x, *weights.values()]
    theirs, ours = (torch.autograd.grad((y * weight).sum(), inputs) for y in (expected, found))
    for a, b in zip((found, *ours), (expected, *theirs), strict=True):
        assert float(((a - b).abs().max() / b.abs().max()).detach()) < 1e-12


@pytest.mark.parametrize("query_rank", [None, 7])
@pytest.mark.parametrize("adapted", [False, True])
def test_the_cache_of_latents_does_not_change_the_text(query_rank, adapted):
    model = model_of(query_rank, window=9).float()
    if adapted:
        apply_lora(model, LoRAConfig(rank=2))
        reset_adapters(model)
        for name, p in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(p, std=0.5)
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 60, "sampling": Sampling(temperature, None, None, 3)}
        cached = list(generate(model, [1, 2, 3], **options))
        assert len(cached) == 60  # the context was cut several times
        assert cached == list(generate(model, [1, 2, 3], use_cache=False, **options))


def test_several_new_positions_and_the_size_of_the_cache():
    model, ids = model_of(7), torch.randint(0, 31, (2, 30))
    cache = KVCache(model.config, 30)
    parts = [model(part, cache=cache) for part in ids.split([11, 1, 18], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), rtol=0, atol=1e-5)  # logits are in fp32
    held = sum(tensor.numel() for layer in cache.layers for part in layer.parts.values() for tensor in [part.held])
    assert held == 2 * 2 * 30 * (LATENT["kv_rank"] + LATENT["rope_head_dim"])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"latent": {"rope_head_dim": 5}}, "model.latent.rope_head_dim"),
        ({"latent": {"kv_rank": 0}}, "model.latent.kv_rank"),
        ({"latent": {"norm_eps": 2.0}}, "model.latent.norm_eps"),
        ({"n_kv_head": 1}, "model.n_kv_head"),
        ({"qk_norm": True}, "model.qk_norm"),
        ({"head_dim": 8}, "model.head_dim"),
        ({"partial_rotary_factor": 0.5}, "model.partial_rotary_factor"),
        ({"qkv_convolution": 4}, "model.qkv_convolution"),
        ({"exclusive_attention": True}, "model.exclusive_attention"),
        ({"attention_sinks": True}, "model.attention_sinks"),
        ({"base_width": 7}, "model.base_width"),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_its_key(settings, named):
    latent = LatentConfig(**{**LATENT, **settings.pop("latent", {})})
    size = {"n_layer": 2, "n_head": HEADS, "n_embd": WIDTH, "block_size": 40, "vocab_size": 31, "qk_norm": False}
    (problem,) = GPTConfig(**{**size, **settings}, latent=latent).problems()
    assert problem.startswith(named) and f"(--{named}" in problem


def test_parameters_and_flops_are_those_of_the_matrices():
    for rank in (None, 7):
        model, length = model_of(rank), 20
        block = model.blocks[0].attention
        matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
        mlp = sum(p.numel() for p in model.blocks[0].mlp.parameters())
        scores = 2 * 3 * length * HEADS * (10 + 5)  # queries times keys, weights times values
        whole = 6 * (2 * (matrices + mlp) + model.head.weight.numel()) + 2 * scores
        assert model.config.flops_per_token(length) == whole

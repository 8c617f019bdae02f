"""The model against published parameter counts and a second, naive implementation in float64."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from lit_llm.models.gpt import GPT, GPTConfig, KVCache
from lit_llm.models.loss import LossSums

GPT2 = {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False,
        "zero_init_projections": False, "pad_vocab_to": 1}  # fmt: skip
LLAMA = {"mlp": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "tie_embeddings": False, "qk_norm": False,
         "zero_init_projections": False, "pad_vocab_to": 1}  # fmt: skip


def config(n_layer, n_head, n_embd, block_size, vocab_size, **rest):
    return GPTConfig(n_layer, n_head, n_embd=n_embd, block_size=block_size, vocab_size=vocab_size, **rest)


PUBLISHED = {
    # Counts of the released weights: Hugging Face model cards / safetensors headers; GPT-2 without the unused masks.
    "GPT-2 124M": (config(12, 12, 768, 1024, 50257, **GPT2), 124_439_808),
    "GPT-2 355M": (config(24, 16, 1024, 1024, 50257, **GPT2), 354_823_168),
    "GPT-2 774M": (config(36, 20, 1280, 1024, 50257, **GPT2), 774_030_080),
    "GPT-2 1.5B": (config(48, 25, 1600, 1024, 50257, **GPT2), 1_557_611_200),
    "LLaMA-2 7B": (config(32, 32, 4096, 4096, 32000, mlp_width=11008, **LLAMA), 6_738_415_616),
    "LLaMA-2 13B": (config(40, 40, 5120, 4096, 32000, mlp_width=13824, **LLAMA), 13_015_864_320),
    "LLaMA-2 70B": (config(80, 64, 8192, 4096, 32000, n_kv_head=8, mlp_width=28672, **LLAMA), 68_976_648_192),
    "Mistral 7B": (config(32, 32, 4096, 8192, 32000, n_kv_head=8, mlp_width=14336, window=4096, **LLAMA), 7_241_732_096),
    # 12Ld² + 2Ld + Vd + d with L 48, d 1600: tied, rotary, two matrices, no biases.
    "12Ld²+2Ld+Vd+d": (config(48, 25, 1600, 1024, 50257, **{**LLAMA, "mlp": "gelu", "tie_embeddings": True}), 1_555_126_400),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_equals_the_published_one(name):
    settings, count = PUBLISHED[name]
    with torch.device("meta"):
        assert GPT(settings).num_parameters() == count


def small(**changes):
    base = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=37, zero_init_projections=False, init_std=0.3)
    return dataclasses.replace(base, **changes)


def naive(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """(B, T) ids to (B, T, V) logits, one query at a time, from the weights alone."""
    c = model.config
    p = {name: tensor.double() for name, tensor in model.named_parameters()}

    def norm(x, name):
        if c.norm == "rmsnorm" or "query" in name or "key" in name:
            return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * p[f"{name}.weight"]
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + c.norm_eps).sqrt()
        return y * p[f"{name}.weight"] + p.get(f"{name}.bias", 0)

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)

    def slow(frequency):  # Llama 3.1, in the words of wavelengths
        if c.rope_scaling is None:
            return frequency
        s, wavelength = c.rope_scaling, 2 * math.pi / frequency
        context = s["original_max_position_embeddings"]
        if wavelength < context / s["high_freq_factor"]:
            return frequency
        if wavelength > context / s["low_freq_factor"]:
            return frequency / s["factor"]
        smooth = (context / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        return (1 - smooth) * frequency / s["factor"] + smooth * frequency

    def turn(x, position):  # complex multiplication: pair (i, i + h/2) is a number, position its angle
        half = x.numel() // 2
        angle = position * torch.tensor([slow(c.rope_theta ** (-i / half)) for i in range(half)], dtype=torch.float64)
        z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half, dtype=torch.float64), angle)
        return torch.cat((z.real, z.imag))

    out = []
    for row in ids.tolist():
        x = p["embedding.weight"][row]
        if c.position == "learned":
            x = x + p["positions.weight"][: len(row)]
        for i in range(c.n_layer):
            b, h = f"blocks.{i}", c.resolved_head_dim
            y = norm(x, f"{b}.attention_norm")
            attended = torch.zeros(len(row), c.n_head * h, dtype=torch.float64)
            for head in range(c.n_head):
                shared = head // (c.n_head // c.kv_heads)
                q = linear(y, f"{b}.attention.query")[:, head * h : (head + 1) * h]
                k = linear(y, f"{b}.attention.key")[:, shared * h : (shared + 1) * h]
                v = linear(y, f"{b}.attention.value")[:, shared * h : (shared + 1) * h]
                if c.qk_norm:
                    q, k = norm(q, f"{b}.attention.query_norm"), norm(k, f"{b}.attention.key_norm")
                if c.position == "rope":
                    q = torch.stack([turn(r, t) for t, r in enumerate(q)])
                    k = torch.stack([turn(r, t) for t, r in enumerate(k)])
                for t in range(len(row)):
                    seen = [s for s in range(t + 1) if c.window is None or t - s < c.window]
                    if c.mask_documents:
                        seen = [s for s in seen if c.eos_id not in row[s:t]]
                    weights = (torch.stack([q[t] @ k[s] for s in seen]) / math.sqrt(h)).softmax(0)
                    attended[t, head * h : (head + 1) * h] = sum(w * v[s] for w, s in zip(weights, seen, strict=True))
            x = x + linear(attended, f"{b}.attention.project")
            y = norm(x, f"{b}.mlp_norm")
            up = linear(y, f"{b}.mlp.up")
            if c.mlp in ("swiglu", "geglu"):
                gate = linear(y, f"{b}.mlp.gate")
                act = gate * torch.sigmoid(gate) if c.mlp == "swiglu" else gate * (1 + torch.erf(gate / 2**0.5)) / 2
                up = act * up
            elif c.mlp == "relu2":
                up = up.clamp(min=0) ** 2
            else:
                up = up / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
            x = x + linear(up, f"{b}.mlp.project")
        z = norm(x, "norm") @ p["embedding.weight" if c.tie_embeddings else "head.weight"].T
        z = z[:, : c.vocab_size]
        out.append(c.logit_softcap * torch.tanh(z / c.logit_softcap) if c.logit_softcap else z)
    return torch.stack(out)


VARIANTS = {
    "defaults": {},
    "gpt2": {**GPT2, "pad_vocab_to": 64},
    "llama": LLAMA,
    "grouped-query": {"n_kv_head": 2},
    "multi-query": {"n_kv_head": 1},
    "geglu": {"mlp": "geglu", "mlp_width": 24},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "softcap": {"logit_softcap": 2.0},
    "documents": {"mask_documents": True, "eos_id": 5},
    "documents and window": {"mask_documents": True, "eos_id": 5, "window": 4, "n_kv_head": 2},
    "wide heads": {"head_dim": 12, "n_kv_head": 2},
    "heads that do not divide the width": {"n_head": 3, "head_dim": 6},
    "biases of q, k, v": {"qkv_bias": True},
    "biases but of q, k, v": {"bias": True, "qkv_bias": False},
    "Llama 3.1": {
        "rope_theta": 100.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 40.0,
        },
    },
    "layernorm without bias": {"norm": "layernorm", "tie_embeddings": True},
}


def randomise_gains(model):
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_a_naive_implementation_in_float64(name):
    torch.manual_seed(0)
    model = GPT(small(**VARIANTS[name])).eval()
    randomise_gains(model)
    ids = torch.randint(0, 37, (2, 11))
    ids[0, 4] = ids[1, 0] = ids[1, 7] = 5  # document ends, also at the first position
    torch.testing.assert_close(model(ids).double(), naive(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_logits_equal_uncached_ones(name):
    torch.manual_seed(1)
    model = GPT(small(**VARIANTS[name])).eval()
    ids = torch.randint(0, 37, (2, 12))
    ids[0, 3] = ids[1, 8] = 5
    cache = KVCache(model.config)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 12))]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), rtol=1e-5, atol=1e-5)


def test_a_token_never_changes_what_came_before_it():
    torch.manual_seed(2)
    model = GPT(small()).eval()
    ids = torch.randint(0, 37, (1, 16))
    other = ids.clone()
    other[0, 9] = (other[0, 9] + 1) % 37
    a, b = model(ids), model(other)
    assert torch.equal(a[:, :9], b[:, :9])
    assert not torch.equal(a[:, 9:], b[:, 9:])


@pytest.mark.parametrize("changes", [{}, GPT2, LLAMA, {"tie_embeddings": True}], ids=["defaults", "gpt2", "llama", "tied"])
@pytest.mark.parametrize("width", [128, 1600])
def test_first_loss_is_within_3_percent_of_ln_V(changes, width):
    torch.manual_seed(3)
    settings = config(2, 4, width, 64, 5000, **changes)
    model = GPT(settings)
    ids = torch.randint(0, 5000, (8, 65))
    sums = model(ids[:, :-1], ids[:, 1:])
    loss = float(sums.nll) / int(sums.count)
    assert loss == pytest.approx(math.log(5000), rel=0.03)


def test_padded_ids_are_never_predicted_and_cost_no_loss():
    torch.manual_seed(4)
    padded = GPT(small(pad_vocab_to=64))
    exact = GPT(small(pad_vocab_to=1))
    exact.load_state_dict({k: v[:37] if v.size(0) == 64 and v.ndim == 2 and k.split(".")[0] in ("embedding", "head") else v
                           for k, v in padded.state_dict().items()})  # fmt: skip
    with torch.no_grad():
        padded.head.weight[37:] = 100.0  # would win every argmax and ruin every softmax, were it looked at
    ids = torch.randint(0, 37, (2, 9))
    assert padded(ids).shape == (2, 9, 37)
    torch.testing.assert_close(padded(ids), exact(ids))
    a, b = padded(ids[:, :-1], ids[:, 1:]), exact(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(a.nll, b.nll)
    a.loss.backward()
    assert padded.head.weight.grad[37:].abs().max() == 0


def test_loss_through_the_model_equals_cross_entropy_of_its_logits():
    torch.manual_seed(5)
    model = GPT(small())
    ids = torch.randint(0, 37, (3, 10))
    targets = ids.roll(-1, dims=1)
    targets[0, 4:] = -100
    sums = model(ids, targets)
    assert isinstance(sums, LossSums)
    expected = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(sums.nll, expected.detach())
    assert int(sums.count) == 24


def test_a_model_from_the_meta_device_equals_one_built_in_place():
    torch.manual_seed(6)
    built = GPT(small())
    with torch.device("meta"):
        model = GPT(small())
    model.to_empty(device="cpu")
    torch.manual_seed(6)
    model.init_weights()
    for (name, a), (_, b) in zip(built.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(built.rope_cos, model.rope_cos) and torch.equal(built.rope_sin, model.rope_sin)


def test_dropout_acts_in_training_only():
    torch.manual_seed(7)
    model = GPT(small(dropout=0.5))
    ids = torch.randint(0, 37, (1, 8))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_flops_per_token_follow_6N_plus_attention():
    # GPT-2 124M: 12 layers of 12 d² plus the tied head, and 12 L d T.
    settings = config(12, 12, 768, 1024, 50257, **GPT2)
    assert settings.flops_per_token() == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    windowed = dataclasses.replace(settings, window=256)
    assert settings.flops_per_token() - windowed.flops_per_token() == 12 * 12 * 768 * (1024 - 256)


@pytest.mark.parametrize("head_dim", [None, 10])
def test_flops_per_token_equal_torchs_count(head_dim):
    # The fused kernel recomputes in backward and is not counted on every device; forward through matmuls compares exactly.
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    settings = small(n_kv_head=2, mlp="swiglu", mlp_width=48, head_dim=head_dim)
    model = GPT(settings).eval()
    ids = torch.randint(0, 37, (2, 16))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    assert counter.get_total_flops() == pytest.approx(settings.flops_per_token() / 3 * ids.numel(), rel=1e-6)


def test_every_configuration_mistake_is_reported_with_its_fix():
    bad = GPTConfig(n_layer=2, n_head=5, n_embd=384, n_kv_head=3, dropout=1.5, vocab_size=10)
    with pytest.raises(ValueError) as caught:
        GPT(bad)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "n_head=5 does not divide model.n_embd=384" in lines[0] and "4, 6" in lines[0]
    assert "n_kv_head=3 does not divide model.n_head=5" in lines[1] and "1, 5" in lines[1]
    assert "dropout" in lines[2]
    assert "even head_dim" in GPTConfig(n_head=2, n_embd=6).problems()[0]
    assert "at least 1" in GPTConfig(n_layer=0).problems()[0]
    assert "model.rope_scaling has ['factor'], but must have" in GPTConfig(rope_scaling={"factor": 8.0}).problems()[0]
    scaling = {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64.0}
    assert "high_freq_factor above low_freq_factor" in GPTConfig(rope_scaling=scaling).problems()[0]

"""The model against published parameter counts and a second, naive implementation in float64."""

import dataclasses
import math

import pytest
import torch

from lit_llm.models.gpt import GPT, GPTConfig, KVCache

GPT2 = {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False,
        "zero_init_projections": False, "pad_vocab_to": 1}  # fmt: skip
LLAMA = {"mlp": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "tie_embeddings": False, "qk_norm": False,
         "zero_init_projections": False, "pad_vocab_to": 1}  # fmt: skip


def config(n_layer, n_head, n_embd, block_size, vocab_size, **rest):
    return GPTConfig(n_layer, n_head, n_embd=n_embd, block_size=block_size, vocab_size=vocab_size, **rest)


def small(**changes):
    base = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=37, zero_init_projections=False, init_std=0.3)
    return dataclasses.replace(base, **changes)


def naive(model: GPT, ids: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
    """(B, T) ids to (B, T, V) logits, one query at a time, from the weights alone."""
    c = model.config
    p = {name: tensor.double() for name, tensor in model.named_parameters()}

    def norm(x, name):
        gain = p[f"{name}.weight"] + (1 if c.norm_unit_offset else 0)
        if c.norm == "rmsnorm" or "query" in name or "key" in name:
            return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * gain
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + c.norm_eps).sqrt()
        return y * gain + p.get(f"{name}.bias", 0)

    def normed(x, name):
        return norm(x, name) if f"{name}.weight" in p else x

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)

    def turn(x, position, length, layer):  # complex multiplication: pair (i, i + r/2) is a number, position its angle
        half = int(x.numel() * c.partial_rotary_factor) // 2
        frequencies, amplitude = scaled_frequencies(layer.rope_theta, layer.rope_scaling, half, length, c.block_size)
        z = torch.complex(x[:half], x[half : 2 * half])
        z = z * torch.polar(torch.full((half,), amplitude, dtype=torch.float64), position * frequencies)
        return torch.cat((z.real, z.imag, x[2 * half :]))

    def gelu(x):
        approximate = c.gelu_approximate or ("tanh" if c.mlp == "gelu" else "none")
        if approximate == "tanh":
            return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x * (1 + torch.erf(x / 2**0.5)) / 2

    out = []
    for number, row in enumerate(ids.tolist()):
        document = [0] * len(row)
        if documents is not None:
            document = documents[number].tolist()
        elif c.mask_documents:
            document = [row[: t + 1].count(c.eos_id) for t in range(len(row))]
        place = [document[:t].count(document[t]) for t in range(len(row))]  # position in its document
        lengths = [document.count(each) for each in document]
        x = p["embedding.weight"][row] * (c.embedding_scale or 1)
        if c.position == "learned":
            x = x + p["positions.weight"][place]
        for i in range(c.n_layer):
            b, h, layer = f"blocks.{i}", c.resolved_head_dim, c.layer(i)

            def convolved(z, name, b=b, document=document):
                weight = p.get(f"{b}.{name}_convolution.weight", torch.zeros(z.size(1))).view(z.size(1), -1)
                pairs = [(t, t - i, i) for t in range(len(z)) for i in range(min(weight.size(1), t + 1))]
                out = z.clone()
                for t, s, i in pairs:
                    if document[s] == document[t]:
                        out[t] += weight[:, i] * z[s]
                return out

            y = convolved(normed(x, f"{b}.attention_norm"), "attention")
            attended = torch.zeros(len(row), c.n_head * h, dtype=torch.float64)
            names = [f"attention.{part}" for part in ("query", "key", "value")]
            queries, keys, values = (convolved(linear(y, f"{b}.{name}"), name) for name in names)
            if c.qk_norm and c.qk_norm_width == "projection":
                queries, keys = norm(queries, f"{b}.attention.query_norm"), norm(keys, f"{b}.attention.key_norm")
            for head in range(c.n_head):
                shared = head // (c.n_head // c.kv_heads)
                q, k = queries[:, head * h : (head + 1) * h], keys[:, shared * h : (shared + 1) * h]
                v = values[:, shared * h : (shared + 1) * h]
                if c.qk_norm and c.qk_norm_width == "head":
                    q, k = norm(q, f"{b}.attention.query_norm"), norm(k, f"{b}.attention.key_norm")
                if c.position == "rope" and layer.rope:
                    q, k = (torch.stack([turn(*each, layer) for each in zip(z, place, lengths, strict=True)]) for z in (q, k))
                for t in range(len(row)):
                    seen = [s for s in range(t + 1) if layer.window is None or t - s < layer.window]
                    seen = [s for s in seen if document[s] == document[t]]
                    scores = torch.stack([q[t] @ k[s] for s in seen]) * (c.attention_scale or 1 / math.sqrt(h))
                    if c.attention_softcap:
                        scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
                    sink = p[f"{b}.attention.sinks"][head].exp() if c.attention_sinks else 0
                    weights = scores.exp() / (scores.exp().sum() + sink)
                    result = sum(w * v[s] for w, s in zip(weights, seen, strict=True))
                    if c.exclusive_attention:  # its rejection from v[t]
                        result = result - (result @ v[t]) / (v[t] @ v[t]) * v[t]
                    attended[t, head * h : (head + 1) * h] = result
            after = x + c.residual_scale * normed(linear(attended, f"{b}.attention.project"), f"{b}.attention_output_norm")
            y = convolved(normed(x if c.parallel_residual else after, f"{b}.mlp_norm"), "mlp")
            up = linear(y, f"{b}.mlp.up")
            if c.mlp == "clamped_swiglu":
                gate = linear(y, f"{b}.mlp.gate").clamp(max=7)
                up = (up.clamp(-7, 7) + 1) * gate / (1 + torch.exp(-1.702 * gate))
            elif c.mlp in ("swiglu", "geglu"):
                gate = linear(y, f"{b}.mlp.gate")
                up = (gate * torch.sigmoid(gate) if c.mlp == "swiglu" else gelu(gate)) * up
            else:
                up = up.clamp(min=0) ** 2 if c.mlp == "relu2" else gelu(up)
            x = after + c.residual_scale * normed(linear(up, f"{b}.mlp.project"), f"{b}.mlp_output_norm")
        z = norm(x, "norm") @ p["embedding.weight" if c.tie_embeddings else "head.weight"].T
        z = z[:, : c.vocab_size] * c.logit_scale
        out.append(c.logit_softcap * torch.tanh(z / c.logit_softcap) if c.logit_softcap else z)
    return torch.stack(out)


def scaled_frequencies(theta, scaling, half, length, context):
    """(half,) frequencies in float64 and the factor of cosines and sines, from the papers."""
    plain = [theta ** (-i / half) for i in range(half)]
    if scaling is None:
        return torch.tensor(plain, dtype=torch.float64), 1.0
    kind, original = scaling.get("rope_type", "llama3"), scaling.get("original_max_position_embeddings")
    factor, amplitude, found = scaling.get("factor"), 1.0, []
    for i, frequency in enumerate(plain):
        wavelength = 2 * math.pi / frequency
        if kind == "linear":
            found.append(frequency / factor)
        elif kind == "longrope":
            factors = scaling["long_factor"] if length > original else scaling["short_factor"]
            found.append(frequency / factors[i])
        elif kind == "yarn":  # section 3.2 of the paper: a ramp between two numbers of turns, in the index of the frequency
            low, high = (
                half * math.log(original / (2 * math.pi * scaling.get(key, default))) / math.log(theta)
                for key, default in (("beta_fast", 32), ("beta_slow", 1))
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * half - 1)
            ramp = min(max((i - low) / (high - low), 0), 1)
            found.append(frequency * (1 - ramp) + frequency / factor * ramp)
        elif wavelength < original / scaling["high_freq_factor"]:  # Llama 3.1, in the words of wavelengths
            found.append(frequency)
        elif wavelength > original / scaling["low_freq_factor"]:
            found.append(frequency / factor)
        else:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = (original / wavelength - low) / (high - low)
            found.append((1 - smooth) * frequency / factor + smooth * frequency)
    if kind == "yarn":
        amplitude = 0.1 * math.log(factor) + 1
    if kind == "longrope":
        amplitude = math.sqrt(1 + math.log(context / original) / math.log(original))
    return torch.tensor(found, dtype=torch.float64), amplitude


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}
VARIANTS = {
    "defaults": {},
    "gpt2": {**GPT2, "pad_vocab_to": 64},
    "llama": LLAMA,
    "grouped-query": {"n_kv_head": 2},
    "multi-query": {"n_kv_head": 1},
    "geglu": {"mlp": "geglu", "mlp_width": 24},
    "clamped_swiglu": {"mlp": "clamped_swiglu", "bias": True},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "softcap": {"logit_softcap": 2.0},
    "documents": {"mask_documents": True, "eos_id": 5},
    "documents, learned positions": {"mask_documents": True, "eos_id": 5, "position": "learned", "norm": "layernorm"},
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
    "OLMo 2": {**LLAMA, "norm_position": "post", "qk_norm": True, "qk_norm_width": "projection", "n_kv_head": 2},
    "Gemma 2": {
        **{"mlp": "geglu", "gelu_approximate": "tanh", "norm_position": "sandwich", "norm_unit_offset": True, "qk_norm": False},
        **{"tie_embeddings": True, "embedding_scale": 32**0.5, "attention_scale": 0.2, "attention_softcap": 1.5},
        **{"logit_softcap": 3.0, "layers": {"window": [3, None]}},
    },
    "Gemma 3": {
        **{"norm_unit_offset": True, "norm_position": "sandwich"},
        "layers": {
            "window": [4, None],
            "rope_theta": [100.0, 1000.0],
            "rope_scaling": [None, {"rope_type": "linear", "factor": 4.0}],
        },
    },
    "gpt-oss": {"attention_sinks": True, "attention_output_bias": True, "qkv_bias": True, "layers": {"window": [3, None]}},
    "SmolLM3": {"layers": {"rope": [True, False]}},
    "GPT-NeoX": {
        **{"norm": "layernorm", "bias": True, "mlp": "gelu", "gelu_approximate": "none", "qk_norm": False},
        **{"parallel_residual": True, "partial_rotary_factor": 0.25, "head_dim": 8},
    },
    "Granite": {"embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 0.25, "attention_scale": 0.05, "mlp_bias": True},
    "convolution": {"qkv_convolution": 3, "n_kv_head": 2, "bias": True},
    "input convolution": {"input_convolution": 4, "n_kv_head": 2},
    "input convolution, documents, post-norm": {
        **{"input_convolution": 20, "qkv_convolution": 2, "norm_position": "post", "mask_documents": True, "eos_id": 5}
    },
    "input convolution, parallel residual": {"input_convolution": 2, "parallel_residual": True},
    "exclusive attention": {"exclusive_attention": True, "n_kv_head": 2, "window": 4, "input_convolution": 3},
    "convolution, documents, QK-norm of projections": {
        **{"qkv_convolution": 20, "qk_norm_width": "projection", "mask_documents": True, "eos_id": 5, "window": 4}
    },
    "norm bias only": {"norm": "layernorm", "norm_bias": True},
    "YaRN": {
        **{"rope_theta": 100.0, "head_dim": 16},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40.0, "beta_fast": 4.0},
    },
    "LongRoPE, short": {"partial_rotary_factor": 0.5, "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 12}},
    "LongRoPE, long": {"partial_rotary_factor": 0.5, "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 8}},
}  # fmt: skip


# Documents of at most 4 positions, and longer ones: each is rotated as if it were alone.
DOCUMENTS = {
    "plain": {},
    "learned positions": {"position": "learned"},
    "window": {"window": 3, "n_kv_head": 1},
    "two tables": {"layers": {"rope_theta": [100.0, 1000.0]}},
    "convolution": {"qkv_convolution": 4, "input_convolution": 3, "exclusive_attention": True},
    "LongRoPE": {"partial_rotary_factor": 0.5, "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 4}},
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


@pytest.mark.parametrize("name", DOCUMENTS)
def test_given_documents_are_computed_apart_and_start_at_position_zero(name):
    torch.manual_seed(8)
    model = GPT(small(mask_documents=True, **DOCUMENTS[name])).eval()
    randomise_gains(model)
    ids = torch.randint(0, 37, (2, 12))
    documents = torch.tensor([[0] * 3 + [1] * 7 + [9] * 2, [4] * 12], dtype=torch.int32)
    logits = model(ids, documents=documents)
    torch.testing.assert_close(logits.double(), naive(model, ids, documents), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[:1, 3:10], model(ids[:1, 3:10], documents=documents[:1, 3:10]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [11, 150])  # below and above the blocks of the kernel
def test_one_document_changes_no_bit_of_another(length):
    torch.manual_seed(9)
    model = GPT(small(block_size=256, mask_documents=True, position="learned")).eval()
    ids, other = torch.randint(0, 37, (2, 1, 200))
    documents = (torch.arange(200) >= length).int()[None]
    changed = torch.cat((other[:, :length], ids[:, length:]), dim=1)
    a, b = model(ids, documents=documents), model(changed, documents=documents)
    assert torch.equal(a[:, length:], b[:, length:]) and not torch.equal(a[:, :length], b[:, :length])


# As in transformers, a cache that grows past LongRoPE's original context mixes two tables.
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "LongRoPE, long"])
def test_cached_logits_equal_uncached_ones(name):
    torch.manual_seed(1)
    model = GPT(small(**VARIANTS[name])).eval()
    ids = torch.randint(0, 37, (2, 12))
    ids[0, 3] = ids[1, 8] = 5
    cache = KVCache(model.config)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 12))]
    whole = model(ids, documents=torch.zeros_like(ids)) if model.config.mask_documents else model(ids)  # one document
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


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
    for a, b in zip(built.rotary.buffers(), model.rotary.buffers(), strict=True):
        assert torch.equal(a, b)


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
    assert "partial_rotary_factor=0.1 of head_dim 64 is 6" not in str(GPTConfig(partial_rotary_factor=0.1).problems())
    assert "partial_rotary_factor=0.05 of head_dim 64 is 3" in GPTConfig(partial_rotary_factor=0.05).problems()[0]
    assert "a window of 256 positions has no effect" in GPTConfig(window=256).problems()[0]
    assert "has 3 values, but the model has 2 blocks: remove 1" in GPTConfig(2, layers={"window": [1, 2, None]}).problems()[0]
    assert "model.layers.windows is unknown" in GPTConfig(layers={"windows": [1]}).problems()[0]
    assert "the nearest is window" in GPTConfig(layers={"windows": [1]}).problems()[0]
    assert "model.layers.window is 0" in GPTConfig(layers={"window": [0]}).problems()[0]
    assert "needs model.position rope" in GPTConfig(position="learned", layers={"rope": [False]}).problems()[0]
    assert "needs model.norm_position pre" in GPTConfig(parallel_residual=True, norm_position="post").problems()[0]
    assert "without model.mlp gelu or geglu" in GPTConfig(gelu_approximate="tanh").problems()[0]
    assert "at least 1" in GPTConfig(n_layer=0).problems()[0]
    assert "model.rope_scaling has factor, but llama3 must have" in GPTConfig(rope_scaling={"factor": 8.0}).problems()[0]
    assert GPTConfig(partial_rotary_factor=math.nan).problems() == [
        "model.partial_rotary_factor is .nan, but must be a finite number above 0 and at most 1 (--model.partial_rotary_factor)"
    ]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0}
WRONG_LAYERS = {
    "windows": (
        {"window": 300, "layers": {"window": [8, 256]}},
        "a window of 256 positions has no effect, because model.block_size is 256: use null (--model.layers)",
    ),
    "rope": (
        {"layers": {"rope": [1, 0, None]}},
        "model.layers.rope has 1, but must have true or false (--model.layers)",
        "model.layers.rope has 0, but must have true or false (--model.layers)",
        "model.layers.rope has null, but must have true or false (--model.layers)",
    ),
    "a scaling in a pattern": (
        {"layers": {"rope_scaling": [None, YARN | {"truncate": 3.0}]}},
        "model.layers.rope_scaling.truncate is 3.0, but must be true or false (--model.layers)",
    ),
    "a flag for a number": (
        {"rope_scaling": YARN | {"factor": True}},
        "model.rope_scaling.factor is true, but must be a finite number above 0 (--model.rope_scaling)",
    ),
    "equal ends": (
        {"rope_scaling": {**YARN, "rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        "model.rope_scaling.high_freq_factor is 4, but must be above low_freq_factor, which is 4 (--model.rope_scaling)",
    ),
    "a list as rope_type": (
        {"rope_scaling": {"rope_type": [1.0]}},
        "model.rope_scaling.rope_type is [1.0], but must be one of llama3, linear, yarn, longrope (--model.rope_scaling)",
    ),
    "LongRoPE": (
        {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1, "short_factor": [0] * 32, "long_factor": ["a"]}},
        "model.rope_scaling.short_factor has 0, but each value must be above 0 (--model.rope_scaling)",
        "model.rope_scaling.long_factor has 'a', but each value must be a finite number above 0 (--model.rope_scaling)",
        "model.rope_scaling.original_max_position_embeddings is 1, but must be above 1 (--model.rope_scaling)",
    ),
    "no logarithm": (
        {"rope_theta": 1.0, "rope_scaling": YARN},
        "model.rope_theta is 1, but must be above 1 with rope_type yarn (--model.rope_theta)",
    ),
    "no logarithm in a layer": (
        {"layers": {"rope_theta": [1e4, 1.0], "rope_scaling": [None, YARN]}},
        "model.layers.rope_theta is 1, but must be above 1 with rope_type yarn (--model.layers)",
    ),
}


@pytest.mark.parametrize("name", WRONG_LAYERS)
def test_a_mistake_in_a_value_of_a_dict_names_that_value_once(name):
    changes, *expected = WRONG_LAYERS[name]
    assert GPTConfig(**changes).problems() == expected


def test_a_pattern_replaces_the_setting_of_its_name():
    assert GPTConfig(window=300, layers={"window": [8, None]}).problems() == []
    assert GPTConfig(rope_theta=1.0, rope_scaling=YARN, layers={"rope_theta": [1e4]}).problems() == []
    assert GPTConfig(rope_theta=1.0, rope_scaling=YARN, layers={"rope": [False]}).problems() == []

"""One model of transformers for each family: odd sizes, random weights, and every setting that the family has."""

import copy

import torch
import transformers as hf
from folders import NO_IDS, ids, randomise
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lit_llm.hf.config_map import links
from lit_llm.hf.tensor_map import VOCABULARY, Link

CONTEXT, WINDOW, ORIGINAL = 96, 7, 24
"""Longest text, sliding window, and the context before a rotary scaling."""
LENGTHS = (1, 20, 64)
"""One position, more than the window, and more than the original context of LongRoPE."""
SIZE = {
    "hidden_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "intermediate_size": 52,
    "vocab_size": 101,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
    **NO_IDS,
}
NO_HEAD_DIM = {key: value for key, value in SIZE.items() if key != "head_dim"} | {"hidden_size": 144}
"""For families in which head_dim is width / heads."""
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
    "short_factor": [1.0 + 0.1 * i for i in range(9)],
    "long_factor": [1.0 + 0.5 * i for i in range(9)],
}
WIDTH = {"moe_intermediate_size": 24}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.6, "logits_scaling": 3.0}

MODELS = {
    "gpt2": lambda: hf.GPT2Config(n_layer=3, n_head=6, n_embd=144, vocab_size=101, n_positions=CONTEXT, **NO_IDS),
    "llama": lambda: hf.LlamaConfig(**SIZE, mlp_bias=True, rope_parameters=dict(LLAMA3)),
    "mistral": lambda: hf.MistralConfig(**SIZE, sliding_window=WINDOW),
    "qwen2": lambda: hf.Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3Config(**SIZE, attention_bias=True, tie_word_embeddings=True),
    "olmo2": lambda: hf.Olmo2Config(**SIZE),
    "olmo3": lambda: hf.Olmo3Config(
        **SIZE | {"num_hidden_layers": 5},
        sliding_window=WINDOW,
        rope_parameters={"full_attention": dict(YARN), "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}},
    ),
    "gemma2": lambda: hf.Gemma2Config(**SIZE, sliding_window=WINDOW, query_pre_attn_scalar=20, attn_logit_softcapping=2.0),
    "gemma3_text": lambda: hf.Gemma3TextConfig(
        **SIZE | {"num_hidden_layers": 7},
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,
        rope_parameters={"full_attention": dict(LINEAR), "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "smollm3": lambda: hf.SmolLM3Config(
        **SIZE | {"num_hidden_layers": 5}, attention_bias=True, use_sliding_window=True, sliding_window=WINDOW
    ),
    "phi3": lambda: hf.Phi3Config(
        **NO_HEAD_DIM, sliding_window=WINDOW, original_max_position_embeddings=ORIGINAL, rope_parameters=copy.deepcopy(LONGROPE)
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**{k: v for k, v in NO_HEAD_DIM.items() if k != "num_key_value_heads"}),
    "starcoder2": lambda: hf.Starcoder2Config(**SIZE, sliding_window=WINDOW),
    "granite": lambda: hf.GraniteConfig(**SIZE, **GRANITE, attention_bias=True),
    "mixtral": lambda: hf.MixtralConfig(**SIZE, sliding_window=WINDOW, num_local_experts=5, num_experts_per_tok=3),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **SIZE, **WIDTH, num_experts=5, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1], attention_bias=True
    ),
    "olmoe": lambda: hf.OlmoeConfig(**NO_HEAD_DIM | {"num_hidden_layers": 2}, num_experts=5, num_experts_per_tok=3),
    "gpt_oss": lambda: hf.GptOssConfig(
        **{**SIZE, "num_hidden_layers": 4},
        sliding_window=WINDOW,
        num_local_experts=5,
        num_experts_per_tok=3,
        rope_parameters={**YARN, "truncate": False},
    ),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **{**SIZE, **WIDTH, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2},
        **{"routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2},
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **{key: value for key, value in SIZE.items() if key not in ("head_dim", "num_key_value_heads")},
        **{"q_lora_rank": 20, "kv_lora_rank": 28, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14},
        **{**WIDTH, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
        **{"num_key_value_heads": 6, "first_k_dense_replace": 1, "attention_bias": True},
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    ),
}
"""`model_type` → configuration."""


def model_of(name: str) -> nn.Module:
    """A model with random weights in fp32, whose logits reach about 10."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager").eval()
    randomise(model)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))
    with torch.no_grad():
        largest = model(ids(2, 20)).logits.abs().max()
        (gain,) = (p for key, p in model.named_parameters() if key.endswith(_LAST_NORMS))
        offset = 1.0 if name.startswith("gemma") else 0.0
        gain.copy_((gain + offset) * (10.0 / largest) - offset)
    return model


_LAST_NORMS = ("model.norm.weight", "ln_f.weight", "final_layer_norm.weight")
"""Settings that can be changed without another set of weights, and the value that is off."""


def gradient_differences(ours: nn.Module, theirs: nn.Module, content: dict) -> dict[str, float]:
    """Of each of their parameters: the largest difference of the gradients in float64, relative to the largest gradient.

    A parameter without effect, such as the bias of keys without rotary embedding, has a gradient of rounding errors only. Its
    difference is relative to the largest gradient of the model.
    """
    mine, other = _gradients(ours), _gradients(theirs)
    largest = max(float(gradient.abs().max()) for gradient in other.values())
    found = {}
    for link in links(content):
        if link.ours[0] not in mine:
            continue  # a buffer: the bias for the choice of experts
        parts = [mine[name][:101] if name in VOCABULARY else mine[name] for name in link.ours]
        parts = parts if link.expert is None else [part[link.expert] for part in parts]
        name, expected = in_the_model(link, other)
        own = float(expected.abs().max())
        difference = float((link.join(parts) - expected).abs().max()) / (own if own > 1e-6 * largest else largest)
        found[name] = max(difference, found.get(name, 0.0))
    return found


def in_the_model(link: Link, model: dict[str, Tensor]) -> tuple[str, Tensor]:
    """The name in the model of transformers, which has all experts in one tensor, and of it the link's part."""
    name = link.theirs.replace("embed_out", "lm_head").replace("block_sparse_moe", "mlp")
    if link.expert is None:
        return name, model[name]
    stem, kind = name.partition(".experts.")[0], link.theirs.split(".")[-2]
    if kind in ("down_proj", "w2"):
        name = f"{stem}.experts.down_proj"
        return name, model[name][link.expert]
    name = f"{stem}.experts.gate_up_proj"
    return name, model[name][link.expert].chunk(2)[kind in ("up_proj", "w3")]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    model.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    tokens = ids(2, 40)
    out = model(tokens)
    out = out if isinstance(out, Tensor) else out.logits
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out.double() * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}

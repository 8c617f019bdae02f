"""LLaMA 1 to 3.x and the families that differ from it by a few settings or keys:

LLAMA (also SmolLM2), MISTRAL, GRANITE 3, QWEN2 and QWEN3, OLMO2 and OLMO3, PHI3 (also Phi-4-mini), STARCODER2, SMOLLM3.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from lit_llm.hf.families.config_parts import (
    ATTENTION_BIASES,
    GATED,
    PLAIN,
    Activation,
    Biases,
    Heads,
    Inverse,
    Setting,
    attention_scale,
    embedding_scale,
)
from lit_llm.hf.families.family import Family, Part
from lit_llm.hf.families.layers import FULL, SLIDING, OptionalWindow, Window, WindowByKind, every, layer_kinds, layer_settings
from lit_llm.hf.families.rope import Rope, RopeByKind
from lit_llm.hf.fields import Fields, shown
from lit_llm.hf.tensor_map import decoder
from lit_llm.models.gpt import GPTConfig

FIXED = {"norm": "rmsnorm", "position": "rope", "qk_norm": False}
"""`Family.fixed` of the decoders with rotary positions and RMSNorm: setting → value."""
SIZES: tuple[Part, ...] = (
    Setting("n_layer", "num_hidden_layers"),
    Setting("block_size", "max_position_embeddings"),
    Setting("mlp_width", "intermediate_size", resolved=lambda config: config.hidden_width),
)
"""Parts for layers, block size and MLP width, with the keys that most families since LLaMA use."""


def gated(norm_eps: float, heads: Part | None = None, activations: Mapping[str, Any] = GATED) -> tuple[Part, ...]:
    """Return parts for LLaMA's sizes, heads, norm, gated MLP. `norm_eps`: rms_norm_eps's default. `heads` None: `Heads()`."""
    norm = Setting("norm_eps", "rms_norm_eps", "number", norm_eps)
    return *SIZES, heads or Heads(), norm, Activation("hidden_act", activations, "silu")


PARTS: tuple[Part, ...] = (*gated(1e-6), Rope())
"""The parts of the family LLAMA, except its parts for biases."""

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fixed=FIXED,
    parts=(*PARTS, Biases("attention_bias", ATTENTION_BIASES), Biases("mlp_bias", ("mlp",))),
    only={"rope_interleaved": (False,)},
    harmless=("is_llama_config",),
)

# Mistral: a window, no biases.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fixed=FIXED,
    parts=(*PARTS, Window(default=4096)),
    only={"attention_bias": (False,), "mlp_bias": (False,)},
)

# Granite 3: factors of embeddings, attention scores, residual updates and logits.
GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    fixed=FIXED,
    parts=(
        *PARTS,
        Setting("embedding_scale", "embedding_multiplier", "number", 1.0, resolved=embedding_scale),
        Setting("attention_scale", "attention_multiplier", "number", 1.0, resolved=attention_scale),
        Setting("residual_scale", "residual_multiplier", "number", 1.0),
        Inverse("logit_scale", "logits_scaling"),
        Biases("attention_bias", ATTENTION_BIASES),
        Biases("mlp_bias", ("mlp",)),
    ),
)

# Qwen2, Qwen2.5 and Qwen3: a window that can be switched on.
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed=FIXED | {"qkv_bias": True},
    parts=(*PARTS, OptionalWindow()),
    only={"use_mrope": (False,)},
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed=FIXED | {"qk_norm": True},
    parts=(*gated(1e-6, Heads(default_head_dim=128)), Rope(), OptionalWindow(), Biases("attention_bias", ATTENTION_BIASES)),
)

# OLMo 2 and 3: norms after attention and MLP, and one norm over all queries or keys of a position.
_OLMO: tuple[Part, ...] = (*gated(1e-5), Biases("attention_bias", ATTENTION_BIASES))
_OLMO_FIXED = FIXED | {"norm_position": "post", "qk_norm": True, "qk_norm_width": "projection"}

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fixed=_OLMO_FIXED,
    parts=(*_OLMO, Rope()),
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    fixed=_OLMO_FIXED,
    parts=(*_OLMO, WindowByKind(every(4)), RopeByKind(every(4), 5e5, 5e5, sliding_theta="rope_theta")),
)

# Phi-3 and Phi-4-mini: LongRoPE, partly rotated heads, and fused matrices.
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fixed=FIXED,
    parts=(
        *gated(1e-5),
        Rope(partial="partial_rotary_factor", default_original=4096, scalings=("longrope",)),
        Window(),
    ),
    tensors=partial(
        decoder,
        attention={"qkv_proj": ("query", "key", "value"), "o_proj": ("project",)},
        mlp={"gate_up_proj": ("gate", "up"), "down_proj": ("project",)},
    ),
    dropouts=("resid_pdrop", "attention_dropout"),
    only={
        **{name: (False,) for name in ("attention_bias", "mlp_bias", "lm_head_bias")},
        **{name: (1,) for name in ("full_attn_mod", "interpolate_factor")},
    },
    harmless=("embd_pdrop",),
)

# StarCoder2: LayerNorm, biases and an MLP of two matrices.
STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fixed={"norm": "layernorm", "position": "rope", "qk_norm": False, "norm_bias": True},
    parts=(
        *SIZES,
        Heads(),
        Setting("norm_eps", "norm_epsilon", "number", 1e-5),
        Activation("hidden_act", PLAIN, "gelu_pytorch_tanh"),
        Rope(),
        Window(),
        Biases("use_bias", ("qkv", "attention_output", "mlp"), default=True),
    ),
    tensors=partial(decoder, mlp={"c_fc": ("up",), "c_proj": ("project",)}),
    tied=True,
    dropouts=("attention_dropout", "residual_dropout", "embedding_dropout"),
    all_dropouts=True,
    only={"norm_type": ("layer_norm",), "mlp_type": ("default",), "scale_attn_weights": (True,)},
    harmless=("activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
)


# SmolLM3: some layers have no rotary embedding.
class _NoRope:
    """`Part` of SMOLLM3: reads and writes which layers have a rotary embedding, and which have a sliding window."""

    def read(self, fields: Fields) -> dict[str, Any]:
        n_layer, interval = fields.size("num_hidden_layers"), fields.optional_size("no_rope_layer_interval", 4)
        rope = fields.raw("no_rope_layers")
        if rope is None:
            rope = [int((i + 1) % interval != 0) for i in range(n_layer)]
        if not isinstance(rope, list) or len(rope) != n_layer or any(each not in (0, 1) for each in rope):
            fields.refuse(f"'no_rope_layers' is {shown(rope)}, but must be a list of 1 and 0 (no rope), one for each layer")
            rope = [1] * n_layer
        window = fields.optional_size("sliding_window", None)
        used = fields.flag("use_sliding_window", False) and window is not None
        kinds = layer_kinds(fields, lambda _: [FULL if rotated or not used else SLIDING for rotated in rope])
        windows = [window if used and kind == SLIDING else None for kind in kinds]
        return {"layers": {"rope": [bool(each) for each in rope], "window": windows}}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        layers = layer_settings(config)
        window = next((layer.window for layer in layers if layer.window is not None), None)
        return {
            "no_rope_layers": [int(layer.rope) for layer in layers],
            "layer_types": [FULL if layer.window is None else SLIDING for layer in layers],
            "sliding_window": window,
            "use_sliding_window": window is not None,
        }


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fixed=FIXED,
    parts=(
        *gated(1e-6),
        Rope(default_theta=2e6),
        _NoRope(),
        Biases("attention_bias", ATTENTION_BIASES),
        Biases("mlp_bias", ("mlp",)),
    ),
    tied=True,
    harmless=("max_window_layers",),
)

"""LLaMA 1 to 3.x and what was built like it, such as SmolLM2."""

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, GATED, Activation, Biases, Heads, Setting
from lit_llm.hf.families.family import Family, Part
from lit_llm.hf.families.rope import Rope
from lit_llm.hf.tensor_map import decoder

FIXED = {"norm": "rmsnorm", "position": "rope", "qk_norm": False}
"""Settings of the decoders with rotary positions and RMSNorm."""
SIZES: tuple[Part, ...] = (
    Setting("n_layer", "num_hidden_layers"),
    Setting("block_size", "max_position_embeddings"),
    Setting("mlp_width", "intermediate_size", resolved=lambda config: config.hidden_width),
)
"""Sizes under the names that all families since LLaMA use."""
PARTS: tuple[Part, ...] = (
    *SIZES,
    Heads(),
    Setting("norm_eps", "rms_norm_eps", "number", 1e-6),
    Activation("hidden_act", GATED, "silu"),
    Rope(),
)
"""LLaMA without biases."""

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fixed=FIXED,
    parts=(*PARTS, Biases("attention_bias", ATTENTION_BIASES), Biases("mlp_bias", ("mlp",))),
    tensors=decoder,
    only={"rope_interleaved": (False,)},
    harmless=("is_llama_config",),
)

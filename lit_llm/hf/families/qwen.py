"""Qwen2, Qwen2.5 and Qwen3."""

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, GATED, Activation, Biases, Heads, Setting
from lit_llm.hf.families.family import Family, Part
from lit_llm.hf.families.layers import OptionalWindow
from lit_llm.hf.families.llama import FIXED, SIZES
from lit_llm.hf.families.rope import Rope
from lit_llm.hf.tensor_map import decoder

_PARTS: tuple[Part, ...] = (
    *SIZES,
    Setting("norm_eps", "rms_norm_eps", "number", 1e-6),
    Activation("hidden_act", GATED, "silu"),
    Rope(),
    OptionalWindow(),
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed=FIXED | {"qkv_bias": True},
    parts=(*_PARTS, Heads()),
    tensors=decoder,
    only={"use_mrope": (False,)},
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed=FIXED | {"qk_norm": True},
    parts=(*_PARTS, Heads(default_head_dim=128), Biases("attention_bias", ATTENTION_BIASES)),
    tensors=decoder,
)

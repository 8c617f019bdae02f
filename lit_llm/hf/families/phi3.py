"""Phi-3 and Phi-4-mini: LLaMA with LongRoPE, partly rotated heads, and fused matrices."""

from functools import partial

from lit_llm.hf.families.config_parts import GATED, Activation, Heads, Setting
from lit_llm.hf.families.family import Family
from lit_llm.hf.families.layers import Window
from lit_llm.hf.families.llama import FIXED, SIZES
from lit_llm.hf.families.rope import Rope
from lit_llm.hf.tensor_map import decoder

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fixed=FIXED,
    parts=(
        *SIZES,
        Heads(),
        Setting("norm_eps", "rms_norm_eps", "number", 1e-5),
        Activation("hidden_act", GATED, "silu"),
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

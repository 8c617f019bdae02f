"""Gemma 2 and the text models of Gemma 3: norms before and after, gains of 1 + weight, scaled embeddings, windows."""

from typing import Any

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, GATED, Activation, Biases, Heads, Setting, attention_scale
from lit_llm.hf.families.family import Family, Part
from lit_llm.hf.families.layers import WindowByKind, every
from lit_llm.hf.families.llama import FIXED, SIZES
from lit_llm.hf.families.rope import Rope, RopeByKind
from lit_llm.hf.fields import Fields
from lit_llm.models.gpt import GPTConfig


class _Scales:
    """`Part` of Gemma: sets embedding_scale to √hidden_size, and converts attention_scale = 1/√query_pre_attn_scalar."""

    def read(self, fields: Fields) -> dict[str, Any]:
        scalar = fields.optional_size("query_pre_attn_scalar", 256)
        return {"embedding_scale": fields.size("hidden_size") ** 0.5, "attention_scale": scalar**-0.5}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        return {"query_pre_attn_scalar": round(attention_scale(config) ** -2)}


_PARTS: tuple[Part, ...] = (
    *SIZES,
    Heads(default_head_dim=256),
    Setting("norm_eps", "rms_norm_eps", "number", 1e-6),
    Activation("hidden_activation", GATED, "gelu_pytorch_tanh"),
    Biases("attention_bias", ATTENTION_BIASES),
    _Scales(),
)
_FIXED = FIXED | {"norm_position": "sandwich", "norm_unit_offset": True}
_ONLY = {"use_bidirectional_attention": (False,)}

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fixed=_FIXED,
    parts=(
        *_PARTS,
        Rope(),
        WindowByKind(every(2)),
        Setting("attention_softcap", "attn_logit_softcapping", "number", 50.0, nullable=True),
        Setting("logit_softcap", "final_logit_softcapping", "number", 30.0, nullable=True),
    ),
    tied=True,
    only=_ONLY,
    harmless=("hidden_act",),
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fixed=_FIXED | {"qk_norm": True},
    parts=(
        *_PARTS,
        WindowByKind(every(6)),
        RopeByKind(every(6), 1e6, 1e4, sliding_theta="rope_local_base_freq"),
        Setting("logit_softcap", "final_logit_softcapping", "number", nullable=True),
    ),
    tied=True,
    harmless=("hidden_act",),
    only=_ONLY | {"attn_logit_softcapping": (None,), "sliding_window_pattern": (6,), "_sliding_window_pattern": (6,)},
)

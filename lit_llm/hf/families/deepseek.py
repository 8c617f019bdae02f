"""DeepSeek-V3 (also Moonlight): latent attention, sigmoid router with a bias for the choice, first layers dense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, GATED, Activation, Biases, Setting
from lit_llm.hf.families.family import Family
from lit_llm.hf.families.llama import FIXED, SIZES
from lit_llm.hf.families.mixture import CHOICE_BIAS, sigmoid_mixture
from lit_llm.hf.families.rope import Rope
from lit_llm.hf.fields import Fields, is_number
from lit_llm.models.gpt import GPTConfig

_WIDTHS = {"nope_head_dim": ("qk_nope_head_dim", 128), "rope_head_dim": ("qk_rope_head_dim", 64)}
_WIDTHS |= {"value_head_dim": ("v_head_dim", 128)}
"""Settings of LatentConfig → their keys, and the values of transformers if they are missing."""


class _Heads:
    """Numbers and widths of heads, and ranks."""

    def read(self, fields: Fields) -> dict[str, Any]:
        n_head = fields.size("num_attention_heads")
        if (kv := fields.optional_size("num_key_value_heads", n_head)) != n_head:
            fields.refuse(f"'num_key_value_heads' is {kv}, but each of the {n_head} heads of this family has its own keys")
        latent = {ours: fields.optional_size(theirs, default) for ours, (theirs, default) in _WIDTHS.items()}
        latent["kv_rank"] = fields.optional_size("kv_lora_rank", 512)
        latent["query_rank"] = fields.optional_size("q_lora_rank", None if fields.has("q_lora_rank") else 1536)
        return {"n_head": n_head, "n_embd": fields.size("hidden_size"), "latent": latent}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        content = {"num_attention_heads": config.n_head, "num_key_value_heads": config.n_head, "hidden_size": config.n_embd}
        if config.latent is None:
            return content
        content |= {theirs: getattr(config.latent, ours) for ours, (theirs, _) in _WIDTHS.items()}
        return {**content, "kv_lora_rank": config.latent.kv_rank, "q_lora_rank": config.latent.query_rank}


@dataclass(frozen=True)
class _ScaledRope(Rope):
    """A rotary embedding whose scaling also scales all scores, by (0.1 mscale_all_dim ln(factor) + 1)²."""

    def read(self, fields: Fields) -> dict[str, Any]:
        rope = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
        strength: Any = rope.get("mscale_all_dim")
        settings = super().read(fields)
        factor: Any = (settings["rope_scaling"] or {}).get("factor")
        if not (strength and is_number(strength) and is_number(factor)):
            return settings
        width = sum(fields.optional_size(*_WIDTHS[name]) for name in ("nope_head_dim", "rope_head_dim"))
        return {**settings, "attention_scale": width**-0.5 * (0.1 * strength * math.log(max(factor, 1.0)) + 1) ** 2}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        content = super().write(config)
        scaling: dict[str, Any] = content["rope_scaling"] or {}
        logarithm = 0.1 * math.log(max(scaling.get("factor", 1.0), 1.0))
        if config.attention_scale is None or scaling.get("rope_type") != "yarn" or not logarithm:
            return content
        strength = (math.sqrt(config.attention_scale * math.sqrt(config.resolved_head_dim)) - 1) / logarithm
        scaling["mscale_all_dim"] = round(strength, 12)  # of a published 1.0 the rounding errors are gone
        if (factor := scaling.get("attention_factor")) is not None:  # DeepSeek's own code reads mscale instead
            scaling["mscale"] = round((factor * (strength * logarithm + 1) - 1) / logarithm, 12)
        return content


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fixed=FIXED,
    parts=(
        *SIZES,
        _Heads(),
        Setting("norm_eps", "rms_norm_eps", "number", 1e-6),
        Activation("hidden_act", {name: mlp for name, mlp in GATED.items() if name != "relu"}, "silu"),
        _ScaledRope(),
        Biases("attention_bias", ATTENTION_BIASES),
        sigmoid_mixture(first_dense=3, scale=2.5, groups=8, top_groups=4),
    ),
    tensors=CHOICE_BIAS,
    only={"rope_interleave": (True,), "moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ahead="num_nextn_predict_layers",
    harmless=(
        *("head_dim", "qk_head_dim"),  # transformers computes them from others
        *("output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size"),  # of training
    ),
)

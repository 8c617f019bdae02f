"""DeepSeek-V3 (also Moonlight): latent attention, sigmoid router with a bias to choose experts, first layers dense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lit_llm.hf.families.config_parts import ATTENTION_BIASES, EXPERTS, Biases, Setting
from lit_llm.hf.families.family import Family
from lit_llm.hf.families.llama import FIXED, gated
from lit_llm.hf.families.mixture import CHOICE_BIAS, sigmoid_mixture
from lit_llm.hf.families.rope import Rope
from lit_llm.hf.fields import Fields, is_number
from lit_llm.models.gpt import GPTConfig

_LATENT = (
    Setting("nope_head_dim", "qk_nope_head_dim", "size", 128),
    Setting("rope_head_dim", "qk_rope_head_dim", "size", 64),
    Setting("value_head_dim", "v_head_dim", "size", 128),
    Setting("kv_rank", "kv_lora_rank", "size", 512),
    Setting("query_rank", "q_lora_rank", "size", 1536, nullable=True),
)
"""The settings of LatentConfig (latent attention), each with its key in config.json and its default."""


class _Heads:
    """`Part` of DeepSeek: reads and writes the number and widths of heads, the model's width and latent attention's ranks."""

    def read(self, fields: Fields) -> dict[str, Any]:
        n_head = fields.size("num_attention_heads")
        if (kv := fields.optional_size("num_key_value_heads", n_head)) != n_head:
            fields.refuse(f"'num_key_value_heads' is {kv}, but each of the {n_head} heads of this family has its own keys")
        latent: dict[str, Any] = {}
        for key in _LATENT:
            latent |= key.read(fields)
        return {"n_head": n_head, "n_embd": fields.size("hidden_size"), "latent": latent}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        content = {"num_attention_heads": config.n_head, "num_key_value_heads": config.n_head, "hidden_size": config.n_embd}
        for key in _LATENT if config.latent is not None else ():
            content |= key.write(config.latent)
        return content


@dataclass(frozen=True)
class _ScaledRope(Rope):
    """`Rope` of DeepSeek that also translates `attention_scale`: rotary scaling by a factor multiplies attention scores by
    (0.1 mscale_all_dim ln(factor) + 1)²."""

    def read(self, fields: Fields) -> dict[str, Any]:
        rope = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
        strength: Any = rope.get("mscale_all_dim")
        settings = super().read(fields)
        factor: Any = (settings["rope_scaling"] or {}).get("factor")
        if not (strength and is_number(strength) and is_number(factor)):
            return settings
        width = sum(sum(key.read(fields).values()) for key in _LATENT[:2])  # width of a query's head
        return {**settings, "attention_scale": width**-0.5 * (0.1 * strength * math.log(max(factor, 1.0)) + 1) ** 2}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        content = super().write(config)
        scaling: dict[str, Any] = content["rope_scaling"] or {}
        logarithm = 0.1 * math.log(max(scaling.get("factor", 1.0), 1.0))
        if config.attention_scale is None or scaling.get("rope_type") != "yarn" or not logarithm:
            return content
        strength = (math.sqrt(config.attention_scale * math.sqrt(config.resolved_head_dim)) - 1) / logarithm
        scaling["mscale_all_dim"] = round(strength, 12)  # without rounding errors, so that 1.0 stays 1.0
        if (factor := scaling.get("attention_factor")) is not None:  # DeepSeek's own code reads mscale instead
            scaling["mscale"] = round((factor * (strength * logarithm + 1) - 1) / logarithm, 12)
        return content


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fixed=FIXED,
    parts=(
        *gated(1e-6, _Heads(), EXPERTS),
        _ScaledRope(),
        Biases("attention_bias", ATTENTION_BIASES),
        sigmoid_mixture(first_dense=3, scale=2.5, groups=8, top_groups=4),
    ),
    tensors=CHOICE_BIAS,
    only={"rope_interleave": (True,), "moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ahead="num_nextn_predict_layers",
    harmless=(
        *("head_dim", "qk_head_dim"),  # transformers computes them from other keys
        *("output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size"),  # for training only
    ),
)

"""What a model needs that is of no known family, as far as its config.json shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_llm.hf.fields import HARMLESS, is_empty, shown

_NEEDS: dict[str, tuple[str, ...]] = {
    "inputs other than text": ("vision_config", "audio_config", "image_token_id", "image_token_index"),
    "an encoder": ("is_encoder_decoder",),
    "state-space layers": ("state_size", "ssm_cfg", "mamba_d_state", "ssm_state_size"),
    "linear attention": ("linear_num_key_heads", "linear_conv_kernel_dim"),
    "ALiBi positions": ("alibi",),
}
"""What lit_llm lacks → the keys that show it, if they are set."""
_SETTINGS: dict[str, tuple[str, ...]] = {
    "attention_scale": ("attention_multiplier", "query_pre_attn_scalar"),
    "attention_softcap": ("attn_logit_softcapping",),
    "embedding_scale": ("scale_emb", "embedding_multiplier"),
    "latent": ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "layers": ("no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern", "rope_local_base_freq"),
    "logit_scale": ("dim_model_base", "logits_scaling", "logit_scale", "lm_head_multiplier"),
    "logit_softcap": ("final_logit_softcapping",),
    "moe": ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "parallel_residual": ("use_parallel_residual", "parallel_attn"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rotary_dim"),
    "qk_norm": ("use_qk_norm", "qk_layernorm", "qk_norm"),
    "qkv_bias": ("qkv_bias", "use_qkv_bias"),
    "residual_scale": ("scale_depth", "residual_multiplier"),
    "window": ("sliding_window",),
}
"""Settings of lit_llm → the keys that families call them by."""
_OFTEN = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "initializer_range", "hidden_act", "rms_norm_eps", "head_dim", "rope_theta", "rope_scaling"),
    *("rope_parameters", "attention_dropout", "tie_word_embeddings", "attention_bias", "mlp_bias", "layer_types"),
    *("max_window_layers", "use_sliding_window"),
}
"""Keys that say nothing about the family."""


def unknown_family(content: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """The refusal of a config.json whose `model_type` is not in `known`. A second line lists keys that tell more."""
    name = content["model_type"]
    lacking = [what for what, keys in _NEEDS.items() if any(content.get(key) for key in keys)]
    if lacking:
        return f"'model_type' is {shown(name)}, which needs {' and '.join(lacking)}: lit_llm does not support that"
    problem = f"'model_type' is {shown(name)}, but lit_llm can import only {', '.join(sorted(known))}"
    own = sorted(key for key, value in content.items() if key not in HARMLESS | _OFTEN and not is_empty(value))
    ours = [f"model.{name} ({key})" for name, keys in _SETTINGS.items() for key in own if key in keys]
    others = [key for key in own if not any(key in keys for keys in _SETTINGS.values())]
    details = []
    if ours:
        details.append(f"it sets {', '.join(ours)}")
    if others:
        what = "else it needs" if ours else "it needs"
        details.append(f"it has keys of its own, which may say what {what}: {', '.join(others[:5])}")
    return problem + "\n" * bool(details) + "; ".join(details)

"""A folder with a modelling file of its own, for models without a family: transformers loads it with `trust_remote_code`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lit_llm.core.errors import refuse
from lit_llm.core.number_domain import shown
from lit_llm.hf.families.family import BIASES
from lit_llm.hf.tensor_map import Link
from lit_llm.models.gpt import GPTConfig, weights_on_meta, without_ahead

_FILE = Path(__file__).with_name("modeling_lit_llm.py")
_LACKS = ("moe", "latent", "rope_scaling")
_OF_TRAINING = {
    *("dropout", "init_std", "zero_init_projections", "base_width", "base_depth", "pad_vocab_to", "mask_documents"),
    *("predict_ahead", "bias", "layers", "window", "rope_theta", "partial_rotary_factor", "eos_id", "tie_embeddings"),
}
"""Settings that the folder's config.json lacks, or has under another name."""


def code_config(config: GPTConfig) -> dict[str, Any]:
    """The config.json.

    Raises:
        UserError: the modelling file lacks a setting; one sentence for each.
    """
    layers = [config.layer(i) for i in range(config.n_layer)]
    lacks = {name: getattr(config, name) for name in _LACKS}
    lacks["layers.rope_scaling"] = next((layer.rope_scaling for layer in layers if layer.rope_scaling), None)
    lacks["mlp"] = config.mlp if config.mlp == "clamped_swiglu" else None
    refuse([f"--format code lacks model.{name} {shown(value)} (--model.{name})" for name, value in lacks.items() if value])
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in {*_LACKS, *_OF_TRAINING}}
    settings |= {f"{part}_bias": config.has_bias(part) for part in BIASES}
    settings |= {"n_kv_head": config.kv_heads, "head_dim": config.resolved_head_dim, "mlp_width": config.hidden_width}
    settings |= {"gelu_approximate": config.resolved_gelu_approximate, "rotated_dims": config.rotated_dims}
    settings["blocks"] = [{"window": one.window, "rope": one.rope, "rope_theta": one.rope_theta} for one in layers]
    return settings | {
        "model_type": "lit_llm",
        "architectures": ["LitLLMForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_lit_llm.LitLLMConfig",
            "AutoModelForCausalLM": "modeling_lit_llm.LitLLMForCausalLM",
        },
        "tie_word_embeddings": config.tie_embeddings,
    }


def own_names(config: GPTConfig) -> list[Link]:
    """The tensors of the folder: ours."""
    return [Link(name, (name,)) for name in without_ahead(weights_on_meta(config), config)]


def write_code(folder: Path) -> None:
    (folder / _FILE.name).write_text(_FILE.read_text(encoding="utf-8"), encoding="utf-8")

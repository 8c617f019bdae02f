"""Export with a modelling file, for models without a family: transformers loads the folder with `trust_remote_code`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_llm.core.errors import refuse
from lit_llm.core.number_domain import shown
from lit_llm.hf.equivalence import computation
from lit_llm.hf.tensor_map import Link
from lit_llm.models.gpt import GPTConfig, weights_on_meta, without_ahead

_FILE = Path(__file__).with_name("modeling_lit_llm.py")
_LACKS = ("moe", "latent", "rope_scaling")
_MLPS = ("relu2", "gelu", "swiglu", "geglu")
"""The values of `model.mlp` that the modelling file modeling_lit_llm.py implements."""
_OTHERWISE = {"window", "rope", "rope_theta", "experts", "partial_rotary_factor", "tie_embeddings"}
"""Settings that config.json of the export has in its list `blocks` or under another name, or does not need."""


def code_config(config: GPTConfig) -> dict[str, Any]:
    """Return the content of config.json for an export with the modelling file modeling_lit_llm.py.

    Raises:
        UserError: the modelling file does not implement a setting; one sentence for each.
    """
    layers = [config.layer(i) for i in range(config.n_layer)]
    lacks = {name: getattr(config, name) for name in _LACKS}
    lacks["layers.rope_scaling"] = next((layer.rope_scaling for layer in layers if layer.rope_scaling), None)
    lacks["mlp"] = None if config.mlp in _MLPS else config.mlp
    instead = "leave out --format, which writes the families of docs/reference/families.md"
    refuse([f"--format code cannot write model.{name} {shown(value)}: {instead}" for name, value in lacks.items() if value])
    settings = {name: value for name, value in computation(config).items() if name not in {*_LACKS, *_OTHERWISE}}
    return settings | {
        "rotated_dims": config.rotated_dims,
        "blocks": [{"window": one.window, "rope": one.rope, "rope_theta": one.rope_theta} for one in layers],
        "model_type": "lit_llm",
        "architectures": ["LitLLMForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_lit_llm.LitLLMConfig",
            "AutoModelForCausalLM": "modeling_lit_llm.LitLLMForCausalLM",
        },
        "tie_word_embeddings": config.tie_embeddings,
    }


def own_names(config: GPTConfig) -> list[Link]:
    """Return the links of an export with a modelling file: each tensor in the folder is one of our tensors, under our name."""
    return [Link(name, (name,)) for name in without_ahead(weights_on_meta(config), config)]


def write_code(folder: Path) -> None:
    (folder / _FILE.name).write_text(_FILE.read_text(encoding="utf-8"), encoding="utf-8")

"""Converts config.json to GPTConfig and back. Settings without an equivalent are refused, never dropped.

Keys and their defaults follow the configuration classes of transformers (5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_llm.core.errors import UserError, refuse
from lit_llm.hf.equivalence import equivalent_family
from lit_llm.hf.families import FAMILIES
from lit_llm.hf.families.family import Family
from lit_llm.hf.fields import Fields, is_size, shown
from lit_llm.hf.tensor_map import Link
from lit_llm.models.config import MODEL_DOMAINS
from lit_llm.models.gpt import GPTConfig

ARCHITECTURES = {name: family.architecture for name, family in FAMILIES.items()}
"""`model_type` → name of the model class in transformers, for each supported family."""
_NEEDS: dict[str, tuple[str, ...]] = {
    "inputs other than text": ("vision_config", "audio_config", "image_token_id", "image_token_index"),
    "an encoder": ("is_encoder_decoder",),
    "state-space layers": ("state_size", "ssm_cfg", "mamba_d_state", "ssm_state_size"),
    "linear attention": ("linear_num_key_heads", "linear_conv_kernel_dim"),
    "ALiBi positions": ("alibi",),
}
"""A feature that lit_llm lacks → the keys that a config.json sets if it needs the feature."""


def read_config(content: dict[str, Any]) -> tuple[GPTConfig, list[str]]:
    """Return (model settings from a parsed config.json; notes for the user on settings that affect only training).

    Raises:
        UserError: the `model_type` or some settings are not supported; one sentence per line.
    """
    family = _named(content)
    fields = Fields(content)
    layers = next((key for key in ("num_hidden_layers", "n_layer") if is_size(content.get(key))), None)
    if layers is not None and not (domain := MODEL_DOMAINS["n_layer"]).accepts(count := content[layers]):
        raise UserError(f"'{layers}' is {shown(count)}, but must be {domain.rule(count)}")  # before lists of so many are made
    if content.get("quantization_config") is not None:
        fields.refuse("'quantization_config': quantised weights cannot be trained; import unquantised ones")
        fields.read.add("quantization_config")
    settings = family.read(fields)
    dropouts = {name: fields.number(name, 0.0, MODEL_DOMAINS["dropout"]) for name in family.dropouts}
    notes = []
    if family.all_dropouts and len(set(dropouts.values())) == 1:
        settings["dropout"] = next(iter(dropouts.values()))
    elif any(dropouts.values()):
        notes.append(f"dropout is set to 0: lit_llm has a single rate, but config.json has {dropouts} (fit --model.dropout)")
    for key in family.unknown_keys(fields):
        fields.refuse(
            f"'{key}' is {shown(content[key])}, but lit_llm does not know this key of {family.model_type}; "
            "remove it from config.json if it does not change the model"
        )
    config = GPTConfig(**settings) if not fields.problems else GPTConfig()
    problems = fields.problems or [mistake.what for mistake in config.mistakes()]  # import has no flags of the model
    refuse(problems)
    return config, notes


def _named(content: dict[str, Any]) -> Family:
    name = content.get("model_type")
    if name is None:
        raise UserError("it has no 'model_type'")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(_unknown_family(content))
    return FAMILIES[name]


def links(content: dict[str, Any]) -> list[Link]:
    """Return the `Link`s (a tensor of a Hugging Face folder, our tensors in it) for a config.json that lit_llm can read."""
    config, _ = read_config(content)
    family = _named(content)
    head = [] if config.tie_embeddings else [Link(family.head, ("head.weight",))]
    return [*family.tensors(config), *head]


def unread_layers(content: dict[str, Any], n_layer: int) -> tuple[str, ...]:
    """Return the prefixes of tensors' names in layers from number `n_layer` on, extra layers that are not imported."""
    key = _named(content).ahead
    count = None if key is None else content.get(key)
    return tuple(f"model.layers.{n_layer + i}." for i in range(count or 0))


def write_config(config: GPTConfig, preferred: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return (content of config.json for a family that computes the same as the model; notes on settings that are lost).

    Args:
        preferred: the `model_type` to take if several families compute the same.

    Raises:
        UserError: no family computes the same; one sentence for each setting that the nearest family lacks.
    """
    family = equivalent_family(config, preferred)
    notes = []
    if config.mask_documents:
        notes.append(
            "model.mask_documents cannot be exported: the logits of a single document are the same, but in an input of "
            "several, later ones attend to earlier ones, and their positions do not restart"
        )
    if config.predict_ahead:
        notes.append(
            f"model.predict_ahead {config.predict_ahead} is not exported: {family.architecture} predicts the next token only, "
            "and the blocks of further tokens are left out"
        )
    if not family.all_dropouts and config.dropout:
        notes.append(
            f"model.dropout {config.dropout} cannot be exported: {family.architecture} does not drop embeddings, attention "
            "weights and residual updates"
        )
    content = family.write(config)
    if config.mlp == "relu2" and content.get("hidden_act") == "relu":
        notes.append("model.mlp relu2 is exported as a ReLU-gated MLP with two equal matrices: same outputs, larger files")
    return content, notes


def _unknown_family(content: Mapping[str, Any]) -> str:
    """Return the error message for a config.json whose `model_type` lit_llm does not know."""
    name = shown(content["model_type"])
    lacking = [what for what, keys in _NEEDS.items() if any(content.get(key) for key in keys)]
    if lacking:
        return f"'model_type' is {name}, which needs {' and '.join(lacking)}: lit_llm does not support that"
    return f"'model_type' is {name}, but lit_llm can import only {', '.join(sorted(FAMILIES))}"

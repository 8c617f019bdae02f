"""The text model of a folder that also reads images. Only this part is imported."""

from __future__ import annotations

import re
from typing import Any

_DEFAULTS = {
    **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072},
}
"""Sizes of Gemma3TextConfig. Published files leave out those that are equal."""
_TEXT_FAMILIES = {"gemma3": ("gemma3_text", _DEFAULTS)}
"""`model_type` → that of its text model, and the sizes that its `text_config` may lack."""
_SHARED = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Keys outside `text_config` that its model needs."""
_PREFIX = re.compile(r"^(?:language_model\.(?=model\.|lm_head\.)|(model\.)language_model\.)")


def text_config(content: dict[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text model alone; None if `content` is of no family that has one."""
    family = content.get("model_type")
    text = content.get("text_config")
    if not isinstance(family, str) or family not in _TEXT_FAMILIES or not isinstance(text, dict):
        return None
    name, defaults = _TEXT_FAMILIES[family]
    shared = {key: content[key] for key in _SHARED if key in content}
    return {**defaults, **shared, **text, "model_type": name}


def name_in_text_model(stored: str) -> str | None:
    """The name of a stored tensor in the text model; None if it belongs to another part."""
    if stored == "lm_head.weight":
        return stored
    found = _PREFIX.match(stored)
    return None if found is None else (found[1] or "") + stored[found.end() :]

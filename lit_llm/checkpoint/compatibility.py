"""Whether a checkpoint's weights can go on under another configuration."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_llm.model import GPTConfig

# Settings that decide the shapes of the weights: no flag makes a checkpoint fit another shape.
SHAPES = {
    *("n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "block_size", "mlp", "mlp_width", "norm", "position", "bias"),
    *("qkv_bias", "tie_embeddings", "qk_norm", "pad_vocab_to", "vocab_size"),
}
INITIAL = ("init_std", "zero_init_projections")  # matter before the first step only


def saved_model_config(content: dict[str, Any], checkpoint: Path, flag: str) -> GPTConfig:
    """The settings of the model whose weights a checkpoint holds.

    Args:
        flag: how the user named the checkpoint.

    Raises:
        ValueError: it is not one of lit_llm, or of a version with other settings.
    """
    if "model_config" not in content:
        raise ValueError(f"{checkpoint} is not a checkpoint of lit_llm: it has no model_config ({flag})")
    try:
        return GPTConfig(**content["model_config"])
    except TypeError as error:
        raise ValueError(f"{checkpoint} is from another version of lit_llm: {error} ({flag})") from error


def model_changes(saved: dict[str, Any], model: GPTConfig, *, accepted: bool) -> list[str]:
    """One sentence for each setting of the model that is not the checkpoint's; null follows the data, so it is no change."""
    found = []
    for name, value in asdict(model).items():
        before = saved.get(name, value)
        if before == value or name in INITIAL or (name in ("vocab_size", "eos_id") and value is None):
            continue
        change = f"model.{name} was {before} in the checkpoint and is {value}"
        if name in SHAPES:
            found.append(f"{change}: these weights do not fit (--model.{name} {before})")
        elif not accepted:
            found.append(f"{change} (--model.{name} {before}, or --accept_changes true)")
    return found

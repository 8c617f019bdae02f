"""Compares a checkpoint's model with the configured one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from pydoc import locate
from typing import Any

from lit_llm.errors import UserError
from lit_llm.models.custom import SETTINGS, Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.renamed_classes import current_name

# Settings that decide the shapes of the weights: no flag makes a checkpoint fit another shape.
SHAPES = {
    *("n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "block_size", "mlp", "mlp_width", "norm", "position", "bias"),
    *("qkv_bias", "tie_embeddings", "qk_norm", "pad_vocab_to", "vocab_size"),
}
INITIAL = ("init_std", "zero_init_projections")  # matter before the first step only


def model_settings(model: GPTConfig, architecture: Architecture | None) -> dict[str, Any]:
    """The settings that a checkpoint stores, as plain values: all of a GPT's; of another model's the class and what counts."""
    if architecture is None:
        return asdict(model)
    return {name: getattr(model, name) for name in SETTINGS} | {"architecture": asdict(architecture)}


def same_class(saved: str, now: str) -> bool:
    """Whether two class paths name one class. The first may be the name that it had when the checkpoint was written."""
    saved = current_name(saved)
    return saved == now or (locate(saved) is not None and locate(saved) is locate(now))


def saved_architecture(content: dict[str, Any]) -> Architecture | None:
    """The model class of a checkpoint of lit_llm; None for a GPT."""
    saved = content["model_config"].get("architecture")
    return None if saved is None else Architecture(**saved)


def saved_model_config(content: dict[str, Any], checkpoint: Path, flag: str) -> GPTConfig:
    """The model settings in a checkpoint. There may be a `saved_architecture`, too.

    Args:
        flag: The flag that named the checkpoint, for messages.

    Raises:
        UserError: It is not a checkpoint of lit_llm, or of a version with other settings.
    """
    if "model_config" not in content:
        raise UserError(f"{checkpoint} is not a checkpoint of lit_llm: it has no model_config ({flag})")
    if not isinstance(content["model_config"], dict):
        raise UserError(f"{checkpoint} is not a checkpoint of lit_llm: its model_config is not a dict ({flag})")
    try:
        return GPTConfig(**{name: value for name, value in content["model_config"].items() if name != "architecture"})
    except TypeError as error:
        raise UserError(f"{checkpoint} is from another version of lit_llm: {error} ({flag})") from error


def model_changes(
    saved: dict[str, Any], model: GPTConfig, architecture: Architecture | None = None, *, accepted: bool
) -> list[str]:
    """One sentence for each model setting that differs from the checkpoint's. A null that follows the data is no difference.

    Args:
        accepted: Ignore settings that do not determine the shapes of the weights. All arguments of a custom architecture are
            ignored then, because only its code knows what they determine; loading the weights compares the shapes.
    """
    was, found = saved.get("architecture"), []
    if (was is None) != (architecture is None):
        before, now = (f"an architecture of yours, {was['class_path']}", "none") if was else ("lit_llm's own", "one of yours")
        flag = f"--architecture {was['class_path']}" if was else "--architecture null"
        return [f"the model was {before} in the checkpoint and is {now}: these weights do not fit ({flag})"]
    if was is not None and architecture is not None and not accepted:
        arguments = architecture.init_args
        changed = [
            (f".{name}", was["init_args"][name], value)
            for name, value in arguments.items()
            if was["init_args"].get(name, value) != value
        ]
        if was["class_path"] != architecture.class_path:
            changed = [("", was["class_path"], architecture.class_path)]
        found += [
            f"architecture{name} was {before} in the checkpoint and is {now} (--architecture{name} {before}, or "
            "--accept_changes true if the weights fit)"
            for name, before, now in changed
        ]
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

"""Compares the model settings that a checkpoint stores with the settings of the model to train."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from pydoc import locate
from typing import Any, get_type_hints

from lit_llm.checkpoint.schema import is_of
from lit_llm.core.errors import UserError
from lit_llm.models.custom import SETTINGS, Architecture
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.latent_config import LatentConfig
from lit_llm.models.lora import LoRAConfig

# Settings that determine the shapes of the weights. A difference in one of them is always refused.
SHAPES = {
    *("n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "block_size", "mlp", "mlp_width", "norm", "position", "bias"),
    *("qkv_bias", "attention_output_bias", "mlp_bias", "norm_bias", "tie_embeddings", "qk_norm", "qk_norm_width"),
    *(f"moe.{name}" for name in ("experts", "expert_width", "shared_experts", "shared_width", "router_bias")),
    *(f"latent.{name}" for name in ("kv_rank", "query_rank", "nope_head_dim", "rope_head_dim", "value_head_dim")),
    *("moe.first_dense", "moe.every", "layers.experts", "norm_position", "predict_ahead", "attention_sinks"),
    *("qkv_convolution", "input_convolution", "pad_vocab_to", "vocab_size"),
}
INITIAL = ("init_std", "zero_init_projections")  # they matter only before the first step
BASES = ("base_width", "base_depth")  # they determine learning rates of the optimizer
# Settings of the data and of training, which do not change what the weights compute:
TRAINING = ("moe.balance", "moe.sequence_balance", "moe.z_loss", "dropout", "mask_documents", "eos_id", *BASES)


def model_settings(model: GPTConfig, architecture: Architecture | None) -> dict[str, Any]:
    """The model settings that a checkpoint stores, by name: all of a GPT. For a custom model: only those named in `SETTINGS`,
    and under "architecture" its class and arguments."""
    if architecture is None:
        return asdict(model)
    return {name: getattr(model, name) for name in SETTINGS} | {"architecture": asdict(architecture)}


def same_class(saved: str, now: str) -> bool:
    """Whether two dotted paths of classes name the same class, which may be exported under two paths."""
    return saved == now or (locate(saved) is not None and locate(saved) is locate(now))


def saved_architecture(content: dict[str, Any]) -> Architecture | None:
    """The class and arguments of the custom model whose weights a checkpoint holds; None for a GPT. `content`: its dict."""
    saved = content["model_config"].get("architecture")
    return None if saved is None else Architecture(**saved)


def saved_model_config(content: dict[str, Any], checkpoint: Path, flag: str) -> GPTConfig:
    """The model settings in a checkpoint. For a custom model, `saved_architecture` returns its class and arguments.

    Args:
        flag: The flag that named the checkpoint, for messages.

    Raises:
        UserError: The checkpoint is not of lit_llm, or it is from a version with other settings.
    """
    if "model_config" not in content:
        raise UserError(f"{checkpoint} is not a checkpoint of lit_llm: it has no model_config ({flag})")
    settings = {name: value for name, value in content["model_config"].items() if name != "architecture"}
    flat = _flat(settings)
    hints = get_type_hints(GPTConfig)
    for group, cls in (("moe", MoEConfig), ("latent", LatentConfig)):
        hints |= {f"{group}.{name}": hint | None for name, hint in get_type_hints(cls).items()}
    if wrong := next((name for name, value in flat.items() if name in hints and not is_of(value, hints[name])), None):
        raise UserError(f"{checkpoint} has the model_config.{wrong} {str(flat[wrong])[:40]!r}, which is not its type ({flag})")
    try:
        return GPTConfig(**settings)
    except TypeError as error:
        raise UserError(f"{checkpoint} is from another version of lit_llm: {error} ({flag})") from error


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """A copy of model settings in which the settings in `moe` and `latent`, and the experts of `layers`, have dotted names,
    such as moe.top_k. Without experts, moe.experts is None."""
    groups = {"moe": settings.get("moe") or {}, "latent": settings.get("latent") or {}}
    layers = settings.get("layers") or {}
    if not all(isinstance(group, dict) for group in groups.values()):
        return settings
    flat = {name: value for name, value in settings.items() if name not in groups}
    if "experts" in layers:
        flat |= {"layers.experts": layers["experts"], "layers": {k: v for k, v in layers.items() if k != "experts"} or None}
    named = {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
    return flat | {"moe.experts": None, "latent.kv_rank": None} | named


def lora_changes(saved: LoRAConfig | None, lora: LoRAConfig | None, *, accepted: bool) -> list[str]:
    """One sentence for each LoRA setting that differs between the checkpoint (`saved`) and the run. None: no adapters.

    Args:
        accepted: Ignore settings that do not determine the shapes of the adapters.
    """
    if saved is None or lora is None:
        if saved is lora:
            return []
        if saved is None:
            return ["the checkpoint holds a whole model, and lora is set (--lora null, or start from its weights: --init_from)"]
        return [f"the checkpoint holds adapters, and lora is null (--lora.rank {saved.rank}, or --config lora)"]
    changes = []
    for name, value in asdict(lora).items():
        before = getattr(saved, name)
        if before != value and not (accepted and name in ("alpha", "dropout")):
            flag = f"--lora.{name} {json.dumps(before)}"
            mend = f"{flag}, or --accept_changes true" if name in ("alpha", "dropout") else flag
            changes.append(f"lora.{name} was {json.dumps(before)} in the checkpoint and is {json.dumps(value)} ({mend})")
    return changes


def model_changes(
    saved: dict[str, Any], model: GPTConfig, architecture: Architecture | None = None, *, accepted: bool
) -> list[str]:
    """One sentence for each model setting that differs between the checkpoint (`saved`) and the run.

    Args:
        accepted: Ignore settings that do not determine the shapes of the weights, and all arguments of a custom architecture,
            because only its code knows what they determine. Loading the weights compares the shapes.
    """
    was, changes = saved.get("architecture"), []
    if (was is None) != (architecture is None):
        before, now = (f"an architecture of yours, {was['class_path']}", "none") if was else ("lit_llm's own", "one of yours")
        flag = f"--architecture {was['class_path']}" if was else "--architecture null"
        return [f"the model was {before} in the checkpoint and is {now}: these weights do not fit ({flag})"]
    if was is not None and architecture is not None and not accepted:
        changed = _changed_arguments(was, architecture)
        if was["class_path"] != architecture.class_path:
            changed = [("", was["class_path"], architecture.class_path)]
        changes += [
            f"architecture{name} was {before} in the checkpoint and is {now} (--architecture{name} {before}, or "
            "--accept_changes true if the weights fit)"
            for name, before, now in changed
        ]
    for name, old, value in _changed_settings(saved, model):
        change = f"model.{name} was {old} in the checkpoint and is {value}"
        group, _, inside = name.partition(".")
        key = group if inside and old is None else name  # a group is turned off as a whole
        flag = f"--model.{key} {old if isinstance(old, str) else json.dumps(old)}"
        if name in SHAPES:
            changes.append(f"{change}: these weights do not fit ({flag})")
        elif not accepted:
            changes.append(f"{change} ({flag}, or --accept_changes true)")
    return changes


def group_changes(saved: dict[str, Any], model: GPTConfig) -> list[str]:
    """A list with a sentence if the optimizer state in a checkpoint does not fit the run's parameter groups; else empty.

    A model with `base_width` or `base_depth` has other parameter groups than a model without.
    """
    had = any(saved.get(name) is not None for name in BASES)
    if had == (model.size_ratios is not None):
        return []
    flags = " ".join(f"--model.{name} {json.dumps(saved.get(name))}" for name in BASES)
    return [f"with model.base_width or model.base_depth the optimizer has other groups: its state does not fit ({flags})"]


def _changed_settings(saved: dict[str, Any], model: GPTConfig) -> list[tuple[str, Any, Any]]:
    """(name, saved value, current value) of each model setting that differs. Settings in `INITIAL` are left out.

    A current `vocab_size` or `eos_id` of None is not compared: the data determine its value.
    """
    before, now = _flat(saved), _flat(asdict(model))
    same = {*INITIAL, *(name for name in ("vocab_size", "eos_id") if now[name] is None)}
    return [(name, before[name], value) for name, value in now.items() if before.get(name, value) != value and name not in same]


def _changed_arguments(was: dict[str, Any], architecture: Architecture) -> list[tuple[str, Any, Any]]:
    """(name with a dot before it, saved value, current value) of each argument of a custom architecture that differs from the
    argument in the checkpoint (`was`)."""
    saved, arguments = was["init_args"], architecture.init_args
    return [(f".{name}", saved[name], value) for name, value in arguments.items() if saved.get(name, value) != value]


def reinterpretations(saved: dict[str, Any], model: GPTConfig, architecture: Architecture | None) -> list[str]:
    """A list with `model.name before → now` for each model setting that differs from the checkpoint's (`saved`), keeps the
    shapes of the weights, but changes what they compute.

    All changed arguments of a custom architecture are listed too, because only its code knows their meaning.
    """
    changed = [
        (f"model.{name}", before, now)
        for name, before, now in _changed_settings(saved, model)
        if name not in SHAPES and name not in TRAINING
    ]
    was = saved.get("architecture")
    if was is not None and architecture is not None:
        changed += [(f"architecture{name}", before, now) for name, before, now in _changed_arguments(was, architecture)]
    return [f"{key} {json.dumps(before, default=str)} → {json.dumps(now, default=str)}" for key, before, now in changed]

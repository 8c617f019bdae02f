"""Reads weights from checkpoints: base weights with the adapters of a LoRA run, or the moving average of weights (EMA).

The checkpoint of a LoRA run has the adapters and two keys: `lora`, the settings of `LoRAConfig`, and `base`, a dict with the
`path` that the checkpoint of the base weights had when the run started, and its `sha256`, computed by `base_sha256`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_llm.callbacks._torch import AVERAGE
from lit_llm.checkpoint.crash_safe import sha256_of
from lit_llm.checkpoint.disk_format import damage, read, read_manifest, read_values
from lit_llm.core.disk import real_path
from lit_llm.core.errors import UserError
from lit_llm.models.lora import LoRAConfig, merged_weights

LORA, BASE = "lora", "base"
"""Keys in a checkpoint: the settings of LoRA adapters, and the path and checksum of the base weights."""

PUT_BACK = "put those weights, or a link to them, back there"


def saved_lora(content: dict[str, Any]) -> LoRAConfig | None:
    """The LoRA settings in the dict of a checkpoint; None if the checkpoint holds a whole model."""
    return LoRAConfig(**content[LORA]) if LORA in content else None


def base_record(checkpoint: Path | None) -> dict[str, str]:
    """The entry `base` in the checkpoints of a LoRA run: {"path", "sha256"} of the checkpoint with the base weights.

    Raises:
        UserError: `checkpoint` is None.
    """
    if checkpoint is None:
        raise UserError("lora trains adapters beside frozen weights: name the run that has them (--init_from)")
    return {"path": str(real_path(checkpoint)), "sha256": base_sha256(checkpoint)}


def base_sha256(checkpoint: Path) -> str:
    """SHA-256, in hex, of a checkpoint file, or of the checksums in a checkpoint folder's manifest: no other file is read."""
    if not checkpoint.is_dir():
        return sha256_of(checkpoint)
    return hashlib.sha256(json.dumps(read_manifest(checkpoint)["files"], sort_keys=True).encode()).hexdigest()


def base_checkpoint(content: dict[str, Any], checkpoint: Path, named: Path | None = None, *, can_be_named: bool = True) -> Path:
    """The path of the checkpoint with the base weights of a LoRA checkpoint.

    Args:
        content: the dict of the LoRA checkpoint.
        checkpoint: the path of the LoRA checkpoint, for messages.
        named: the path of the base weights that the user gave; None: the path that `content` records.
        can_be_named: whether messages may advise --init_from. Not if that flag names the LoRA checkpoint itself.

    Raises:
        UserError: the base weights are missing, or are not the weights with which the adapters were trained.
    """
    was = Path(content[BASE]["path"])
    path = was if named is None else named
    if not path.exists():
        mend = "restore them, or name the run folder that holds them now (--init_from)" if can_be_named else PUT_BACK
        raise UserError(f"{checkpoint} holds adapters, and their base weights {path} are missing: {mend}")
    if base_sha256(path) != content[BASE]["sha256"]:
        mend = f" (--init_from {was}, or the run folder that holds them now)" if can_be_named else f": {PUT_BACK}"
        raise UserError(
            f"{checkpoint} holds adapters for the base weights {was} as they were then, but {path} holds others{mend}"
        )
    return path


def saved_weights(
    content: dict[str, Any],
    checkpoint: Path,
    *,
    base: Path | None = None,
    verify: bool = False,
    base_can_be_named: bool = True,
    average: str | None = None,
) -> dict[str, Any]:
    """The weights in a checkpoint: name → tensor, or `TensorOnDisk` for a tensor in shards.

    For a LoRA run, the result has the base weights. A weight that has an adapter is a `MergedTensor`.

    Args:
        base: the checkpoint of a LoRA run's base weights; None: the path that the run recorded.
        verify: whether to verify the checkpoint of the base weights first.
        base_can_be_named: whether messages may advise --init_from for the base weights.
        average: None for the weights. For their moving average (EMA): the flag that asks for the average, for messages.

    Raises:
        UserError: base weights are missing, damaged, or not the weights used in training; `base` is given, but the checkpoint
            has no adapters; the checkpoint has no average.
    """
    if "state_dict" not in content:
        raise UserError(f"{checkpoint} has no weights (state_dict): restore it, or use another one")
    state = content["state_dict"] if average is None else averaged(content, checkpoint, average)
    saved = {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}
    lora = saved_lora(content)
    if lora is None:
        if base is not None:
            raise UserError(no_base(checkpoint))
        return saved
    path = base_checkpoint(content, checkpoint, base, can_be_named=base_can_be_named)
    weights = saved_weights(read(path, verify=verify, lazy=True), path, verify=verify, base_can_be_named=False)
    return weights | merged_weights(weights, saved, lora)


def no_base(checkpoint: Path) -> str:
    """The message that refuses --init_from, which names base weights, for a checkpoint without adapters."""
    return f"{checkpoint} holds a whole model, no adapters, so it has no base weights to name: leave out --init_from"


def base_damage(content: dict[str, Any], checkpoint: Path) -> str | None:
    """Why the base weights of a LoRA checkpoint, or the base of these weights, are unusable; None if usable or without LoRA."""
    if LORA not in content:
        return None
    try:
        base = base_checkpoint(content, checkpoint, can_be_named=False)
    except UserError as error:
        return str(error)
    return damage(base) or base_damage(read_values(base), base)


EMA_HELP = "the average of the weights that the run kept (--ema EMA) instead of the weights"
"""The help text of the flag --ema, which several commands have."""


def average_problem(content: Mapping[str, Any], checkpoint: Path, flag: str) -> str | None:
    """A sentence if a checkpoint has no moving average of the weights; else None. `flag`: the flag that asks for it."""
    if AVERAGE in content:
        return None
    return f"{checkpoint} holds no average of the weights: train with --ema EMA, or leave out {flag}"


def averaged(content: Mapping[str, Any], checkpoint: Path, flag: str) -> dict[str, Any]:
    """The state dict of a checkpoint, in which the moving average (EMA) replaces each trained weight. Buffers and frozen
    weights have no average, and stay.

    Raises:
        UserError: The checkpoint has no average. The message names `flag`, which asks for the average.
    """
    if problem := average_problem(content, checkpoint, flag):
        raise UserError(problem)
    return {**content["state_dict"], **content[AVERAGE]}

"""Weights in checkpoints: adapters of LoRA runs, whose checkpoints name their base weights, and the average that EMA keeps.

lora    the settings of `LoRAConfig`
base    path: the checkpoint of the base when the run started; sha256: its `base_sha256`
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
"""The keys in a checkpoint of the adapters' settings and of the record of their base."""

PUT_BACK = "put those weights, or a link to them, back there"


def saved_lora(content: dict[str, Any]) -> LoRAConfig | None:
    """The adapters' settings; None if a checkpoint holds a whole model."""
    return LoRAConfig(**content[LORA]) if LORA in content else None


def base_record(checkpoint: Path | None) -> dict[str, str]:
    """The entry `base` in the checkpoints of a LoRA run: path and `base_sha256` of its base weights.

    Raises:
        UserError: there is no base.
    """
    if checkpoint is None:
        raise UserError("lora trains adapters beside frozen weights: name the run that has them (--init_from)")
    return {"path": str(real_path(checkpoint)), "sha256": base_sha256(checkpoint)}


def base_sha256(checkpoint: Path) -> str:
    """A checksum of a checkpoint's content. In a folder, this reads only the manifest, which has a checksum of each file."""
    if not checkpoint.is_dir():
        return sha256_of(checkpoint)
    return hashlib.sha256(json.dumps(read_manifest(checkpoint)["files"], sort_keys=True).encode()).hexdigest()


def base_checkpoint(content: dict[str, Any], checkpoint: Path, named: Path | None = None, *, can_be_named: bool = True) -> Path:
    """The checkpoint of the base of a LoRA checkpoint.

    Args:
        named: the path of the base that the user gave; None: the path that the checkpoint records.
        can_be_named: whether the command's --init_from can name this base. It cannot if it names the checkpoint itself.

    Raises:
        UserError: the base is missing, or its weights are not the ones with which the adapters were trained.
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
    """The weights in a checkpoint by name: tensors, or `TensorOnDisk` for tensors in shards.

    For a LoRA run, these are the weights of its base. A weight with an adapter is a `MergedTensor`.

    Args:
        base: where the base weights of a LoRA run are; None: where they were in training.
        verify: whether to verify the base's checkpoint first.
        base_can_be_named: `can_be_named` of `base_checkpoint`.
        average: None for the weights. For their average instead: the flag by which the user asked for it, for messages.

    Raises:
        UserError: base weights are missing, damaged, or not the ones used in training; `base` is given, but the checkpoint has
            no adapters; there is no average.
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
    """The sentence that refuses --init_from for a checkpoint without adapters."""
    return f"{checkpoint} holds a whole model, no adapters, so it has no base weights to name: leave out --init_from"


def base_damage(content: dict[str, Any], checkpoint: Path) -> str | None:
    """Why the base of a checkpoint, or the base of that base, cannot be used, as a sentence; None if both can be used."""
    if LORA not in content:
        return None
    try:
        base = base_checkpoint(content, checkpoint, can_be_named=False)
    except UserError as error:
        return str(error)
    return damage(base) or base_damage(read_values(base), base)


EMA_HELP = "the average of the weights that the run kept (--ema EMA) instead of the weights"
"""Help of a command's flag --ema."""


def average_problem(content: Mapping[str, Any], checkpoint: Path, flag: str) -> str | None:
    """A sentence if a checkpoint has no average of the weights; None if it has one. `flag` is the flag that asks for it."""
    if AVERAGE in content:
        return None
    return f"{checkpoint} holds no average of the weights: train with --ema EMA, or leave out {flag}"


def averaged(content: Mapping[str, Any], checkpoint: Path, flag: str) -> dict[str, Any]:
    """The state dict of a checkpoint with averaged weights. Buffers and frozen weights have no average, and stay as they are.

    Raises:
        UserError: There is no average.
    """
    if problem := average_problem(content, checkpoint, flag):
        raise UserError(problem)
    return {**content["state_dict"], **content[AVERAGE]}

"""Weights in checkpoints: of LoRA runs, which hold adapters only and name their base, and the average that EMA keeps.

lora    the settings of `LoRAConfig`
base    path: the base's checkpoint when the run started; sha256: what `base_sha256` gives for it
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
"""Keys in a checkpoint."""

PUT_BACK = "put those weights, or a link to them, back there"


def saved_lora(content: dict[str, Any]) -> LoRAConfig | None:
    """The adapters' settings; None if a checkpoint holds a whole model."""
    return LoRAConfig(**content[LORA]) if LORA in content else None


def base_record(checkpoint: Path) -> dict[str, str]:
    """What the checkpoints of a LoRA run remember about their base. Plain values."""
    return {"path": str(real_path(checkpoint)), "sha256": base_sha256(checkpoint)}


def base_sha256(checkpoint: Path) -> str:
    """Identifies the content of a checkpoint. Of a folder this reads only the manifest, which has a checksum of each file."""
    if not checkpoint.is_dir():
        return sha256_of(checkpoint)
    return hashlib.sha256(json.dumps(read_manifest(checkpoint)["files"], sort_keys=True).encode()).hexdigest()


def base_checkpoint(content: dict[str, Any], checkpoint: Path, named: Path | None = None, *, can_be_named: bool = True) -> Path:
    """The checkpoint of the base of a LoRA checkpoint.

    Args:
        named: where the user says it is; None: where it was.
        can_be_named: whether --init_from of the command names it; not if it is the base of what --init_from names.

    Raises:
        UserError: it is missing, or holds other weights than those that the adapters were trained with.
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
    """The weights in a checkpoint by name: tensors, or with shards on disk `TensorOnDisk`.

    Of a LoRA run, the weights of its base; those with an adapter are a `MergedTensor`.

    Args:
        base: where the base weights of a LoRA run are; None: where they were in training.
        verify: verify the base.
        base_can_be_named: as `can_be_named` of `base_checkpoint`.
        average: the flag that asks for the average of the weights instead.

    Raises:
        UserError: base weights are missing, damaged, or others than in training; or they are named and there are none; or
            there is no average.
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
    """A sentence for an --init_from beside a checkpoint without adapters."""
    return f"{checkpoint} holds a whole model, no adapters, so it has no base weights to name: leave out --init_from"


def base_damage(content: dict[str, Any], checkpoint: Path) -> str | None:
    """Why the base of what --init_from names, or a base of that, cannot be used, as a sentence. Reads each once."""
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
    """A sentence if a checkpoint has no average.

    Args:
        flag: which asks for one.
    """
    if AVERAGE in content:
        return None
    return f"{checkpoint} holds no average of the weights: train with --ema EMA, or leave out {flag}"


def averaged(content: Mapping[str, Any], checkpoint: Path, flag: str) -> dict[str, Any]:
    """The state dict of a checkpoint with the average of the weights. Buffers and frozen weights have none.

    Raises:
        UserError: There is no average.
    """
    if problem := average_problem(content, checkpoint, flag):
        raise UserError(problem)
    return {**content["state_dict"], **content[AVERAGE]}

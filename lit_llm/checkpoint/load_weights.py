"""Loads a checkpoint's weights into a model, on one process or on a mesh of processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_llm.checkpoint.format import read
from lit_llm.dtensor import fill_
from lit_llm.errors import UserError


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Copy a checkpoint's weights into a model, in the model's dtype. Each rank copies its part of distributed parameters.

    Raises:
        UserError: The weights belong to another model.
    """
    saved = read(checkpoint, verify=False, lazy=True)["state_dict"]
    saved = {name.removeprefix("model."): tensor for name, tensor in saved.items() if name.startswith("model.")}
    copy_weights(model.state_dict(), saved, f"{checkpoint} (--init_from)")


def copy_weights(own: Mapping[str, Tensor], saved: Mapping[str, Any], source: str, *, strict: bool = True) -> None:
    """Copy tensors by name. Of tensors in shards on disk (`sharded.TensorOnDisk`) a rank reads only its part.

    Args:
        source: For messages: where the tensors come from, and the flag that named it.
        strict: Require the same names on both sides. Otherwise tensors without a counterpart are skipped.

    Raises:
        UserError: Shapes differ, or with `strict`, names differ.
    """
    if problem := mismatch(own, saved, source, strict=strict):
        raise UserError(problem)
    for name in own.keys() & saved.keys():
        fill_(own[name], saved[name] if isinstance(own[name], DTensor) else saved[name][...])


def mismatch(own: Mapping[str, Any], saved: Mapping[str, Any], source: str, *, strict: bool = True) -> str | None:
    """How saved weights differ from a model's in names and shapes; None if they fit. Arguments as for `copy_weights`."""
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if strict and (missing or unexpected):
        return (
            f"the weights are not this model's: missing {missing[:3] or 'nothing'}, unexpected {unexpected[:3] or 'nothing'}, "
            f"in {source}"
        )
    for name in sorted(own.keys() & saved.keys()):
        here, there = tuple(own[name].shape), tuple(saved[name].shape)
        if here != there:
            return f"{name} does not fit this model: it has shape {there} and the model's has {here}, in {source}"
    return None

"""Sharded checkpoints: every rank writes its parts of distributed tensors into the same checkpoint folder.

    step-00000500.ckpt/
        checkpoint.pt                 Lightning's dict, with a placeholder for each distributed tensor
        shard-00000-of-00004.pt, …    name → offset in the whole tensor and this rank's part of it
        manifest.json                 as in every checkpoint

Why not torch.distributed.checkpoint: loading executes its metadata, which is a pickle, and it writes in place, so a killed
save leaves an incomplete checkpoint. Here the parts are plain tensors (loaded with `weights_only`). Each file is its own index
and is memory-mapped, so a rank reads only what it needs from a checkpoint of any layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_llm.dtensor import holds_first_copy, local_slice
from lit_llm.errors import UserError

PLACEHOLDER = "sharded tensor"
"""Key of the dict that replaces a distributed tensor in checkpoint.pt; its value is the tensor's name."""


def split(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """{"rest": nested dict with placeholders, "parts": this rank's parts}. Plain tensors stay in "rest"."""
    parts: dict[str, dict[str, Any]] = {}

    def visit(value: Any, name: str) -> Any:
        if isinstance(value, DTensor):
            where = local_slice(value)
            if holds_first_copy(value) and all(s.stop > s.start for s in where):
                parts[name] = {"offset": [s.start for s in where], "part": value.to_local().detach()}
            return {PLACEHOLDER: name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, dict):
            return {key: visit(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item, f"{name}.{i}") for i, item in enumerate(value)]
        return value

    rest = visit(checkpoint, "")
    return {"rest": rest, "parts": parts}


class Part(NamedTuple):
    """A box of a whole tensor: its offset in each dimension, and its values."""

    offset: tuple[int, ...]
    values: Tensor


class TensorOnDisk:
    """A tensor whose parts are in memory-mapped files. Indexing with one slice per dimension, or `...`, reads only that box.

    Raises:
        UserError: The parts do not cover the whole tensor.
    """

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, parts: list[Part]) -> None:
        self.shape, self.dtype, self.parts = shape, dtype, parts
        there = sum(part.values.numel() for part in parts)
        if there != math.prod(shape):  # parts never overlap: only the first rank that holds a part writes it
            raise UserError(f"the checkpoint's shards hold {there} of the {math.prod(shape)} values of {name}")

    def __getitem__(self, box: Any) -> Tensor:
        wanted = [slice(0, n) for n in self.shape] if box is ... else list(box)
        out = torch.empty([s.stop - s.start for s in wanted], dtype=self.dtype)
        for offset, values in self.parts:
            source, target = [], []
            for s, start, size in zip(wanted, offset, values.shape, strict=True):
                first, last = max(s.start, start), min(s.stop, start + size)
                source.append(slice(first - start, max(first, last) - start))
                target.append(slice(first - s.start, max(first, last) - s.start))
            out[tuple(target)] = values[tuple(source)]
        return out


def join(rest: dict[str, Any], files: list[Path], load: Callable[[Path], dict[str, Any]], *, lazy: bool) -> dict[str, Any]:
    """Undo `split`: the checkpoint, from the files of all ranks.

    Args:
        load: Loads one file of parts, memory-mapped.
        lazy: Leave tensors on disk, as `TensorOnDisk`, for ranks that need a part of each.
    """
    parts: dict[str, list[Part]] = {}
    for file in files:
        for name, entry in load(file).items():
            parts.setdefault(name, []).append(Part(tuple(entry["offset"]), entry["part"]))

    def visit(value: Any) -> Any:
        if isinstance(value, dict) and PLACEHOLDER in value:
            name = value[PLACEHOLDER]
            tensor = TensorOnDisk(name, torch.Size(value["shape"]), getattr(torch, value["dtype"]), parts.get(name, []))
            return tensor if lazy else tensor[...]
        if isinstance(value, dict):
            return {key: visit(item) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item) for item in value]
        return value

    joined: dict[str, Any] = visit(rest)
    return joined

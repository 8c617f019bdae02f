"""Sharded checkpoints: every rank writes its parts of distributed tensors into the same checkpoint folder.

    step-00000500.ckpt/
        checkpoint.pt                 Lightning's dict, with a placeholder for each distributed tensor
        shard-00000-of-00004.pt, …    name → offset in the whole tensor and this rank's part of it
        manifest.json                 as in every checkpoint

torch.distributed.checkpoint is not used, because loading executes its metadata, which is a pickle, and because it writes in
place, so a killed save leaves an incomplete checkpoint. Here the parts are plain tensors (loaded with `weights_only`). Each
file is its own index and is memory-mapped, so a rank reads only the parts it needs, whatever layout wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_llm.checkpoint.placeholders import Placeholder, placeholders_in, put_in, take_out
from lit_llm.checkpoint.stages import STAGED, Stages
from lit_llm.core.dtensor import holds_first_copy, local_box
from lit_llm.core.errors import UserError


def split(checkpoint: dict[str, Any], stages: Stages | None = None) -> dict[str, Any]:
    """Return {"rest": nested dict with placeholders, "parts": this rank's parts}. Called on all ranks.

    Plain tensors stay in "rest", except those of pipeline stages.

    Args:
        stages: the ranks that hold the other pipeline stages of the model.
    """
    rest, tensors, writers = _take_out(checkpoint, stages)
    own, leads = (0, True) if stages is None else (stages.rank, stages.leads)
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if writers.get(name, 0) != own:
            continue
        if not isinstance(tensor, DTensor):
            if leads:
                parts[name] = {"offset": [0] * tensor.ndim, "part": tensor.detach()}
            continue
        where = local_box(tensor)
        if holds_first_copy(tensor) and all(s.stop > s.start for s in where):
            parts[name] = {"offset": [s.start for s in where], "part": tensor.to_local().detach()}
    return {"rest": rest, "parts": parts}


def gather(checkpoint: dict[str, Any], *, keep: bool, stages: Stages | None = None) -> dict[str, Any]:
    """The checkpoint as one process would have it. Called on all ranks, which gather the tensors one by one.

    Args:
        keep: whether this is rank 0, which keeps tensors in host memory. Other ranks drop them and return placeholders.
        stages: the ranks that hold the other pipeline stages of the model.
    """
    rest, tensors, writers = _take_out(checkpoint, stages)
    own = 0 if stages is None else stages.rank
    gathered: dict[str, Tensor] = {}
    for each in placeholders_in(rest):
        writer = writers.get(each.name, 0)
        tensor = tensors[each.name] if writer == own else None
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()  # a collective of the ranks with this stage
        if stages is not None and stages.leads:
            tensor = stages.bring_to_first(tensor, writer, each.shape, each.dtype)
        if keep:
            assert tensor is not None
            gathered[each.name] = tensor.cpu()
    return put_in(rest, lambda each: gathered[each.name]) if keep else rest


def _take_out(checkpoint: dict[str, Any], stages: Stages | None) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, int]]:
    """(checkpoint with placeholders, this rank's tensors by name, name → pipeline rank that writes it, {} without stages)."""
    rest, tensors = take_out(checkpoint, lambda name: stages is not None and name.partition(".")[0] in STAGED)
    if stages is None:
        return rest, tensors, {}
    rest, writers = stages.merge(rest)
    return rest, tensors, writers


class TensorOnDisk:
    """A tensor whose parts are in memory-mapped files. Indexing with one slice per dimension, or `...`, reads only that box.

    Args:
        parts: boxes of the tensor, as (offset in each dimension, values).

    Raises:
        UserError: The parts do not cover the whole tensor.
    """

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, parts: list[tuple[list[int], Tensor]]) -> None:
        self.shape, self.dtype, self.parts = shape, dtype, parts
        there = sum(values.numel() for _, values in parts)
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


def join(rest: dict[str, Any], files: Iterable[str], load: Callable[[str], dict[str, Any]], *, lazy: bool) -> dict[str, Any]:
    """Undo `split`: return the checkpoint, from `rest` and the files of all ranks.

    Args:
        load: Loads one file of parts, memory-mapped.
        lazy: Leave tensors on disk, as `TensorOnDisk`, for ranks that need only a part of each tensor.
    """
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in files:
        for name, entry in load(file).items():
            parts.setdefault(name, []).append((entry["offset"], entry["part"]))

    def tensor_of(each: Placeholder) -> Any:
        tensor = TensorOnDisk(each.name, each.shape, each.dtype, parts.get(each.name, []))
        return tensor if lazy else tensor[...]

    return cast(dict[str, Any], put_in(rest, tensor_of))

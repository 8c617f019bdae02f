"""Sharded checkpoints: every rank writes its local parts of DTensors into one checkpoint folder.

    step-00000500.ckpt/
        checkpoint.pt                 Lightning's dict, with a placeholder for each DTensor
        shard-00000-of-00004.pt, …    name → a rank's part of the tensor, and the part's offset in the whole tensor
        manifest.json                 as in every checkpoint

torch.distributed.checkpoint is not used: loading executes its metadata, which is a pickle, and a save that is killed leaves an
incomplete checkpoint, because files are written in place. Here the parts are plain tensors, loaded with `weights_only`. Each
shard lists its own parts and is memory-mapped, so a rank reads only the parts it needs, whatever layout wrote the shards.
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
    """Split a checkpoint into what rank 0 writes and what each rank writes. Called on all ranks.

    Returns {"rest": the checkpoint with placeholders, "parts": name → {"offset", "part"} of this rank's tensors}. Plain tensors
    stay in "rest", except the tensors of pipeline stages.

    Args:
        stages: the pipeline of this rank; None without pipeline parallelism.
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
    """The checkpoint that one process would have, with whole tensors. All ranks call this, and gather one tensor at a time.

    Args:
        keep: whether this rank is rank 0, which keeps the tensors in host memory. Other ranks return placeholders instead.
        stages: the pipeline of this rank; None without pipeline parallelism.
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
    """Take the sharded tensors, and those of pipeline stages, out of a checkpoint. Return (checkpoint with placeholders, name →
    tensor of this rank, name → pipeline rank that writes the tensor; {} without stages)."""
    rest, tensors = take_out(checkpoint, lambda name: stages is not None and name.partition(".")[0] in STAGED)
    if stages is None:
        return rest, tensors, {}
    rest, writers = stages.merge(rest)
    return rest, tensors, writers


class TensorOnDisk:
    """A tensor whose parts are in memory-mapped files. `tensor[slices]`, a slice per dimension, or `tensor[...]` reads values.

    Args:
        parts: for each part, (its offset in each dimension of the tensor, its values).

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
    """Put the tensors in the shards of all ranks back into the checkpoint, which is returned. The inverse of `split`.

    Args:
        rest: the checkpoint with placeholders.
        files: names of the shards.
        load: reads a shard, memory-mapped: name → {"offset", "part"}.
        lazy: leave tensors on disk, as `TensorOnDisk`, for ranks that need only a part of each tensor.
    """
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in files:
        for name, entry in load(file).items():
            parts.setdefault(name, []).append((entry["offset"], entry["part"]))

    def tensor_of(each: Placeholder) -> Any:
        tensor = TensorOnDisk(each.name, each.shape, each.dtype, parts.get(each.name, []))
        return tensor if lazy else tensor[...]

    return cast(dict[str, Any], put_in(rest, tensor_of))

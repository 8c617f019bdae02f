"""Checkpoints of a model whose pipeline stages are on different ranks. They equal the checkpoints of one process.

Each rank holds the tensors of its own stages, under the names that they have on one process, and an optimizer of its own
parameters. A tied matrix that several ranks of a pipeline hold has the same values on all; the first of these ranks writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_llm.callbacks._torch import AVERAGE
from lit_llm.checkpoint.placeholders import is_placeholder, placeholders_in

STAGED = ("state_dict", "optimizer_states", AVERAGE)
"""The entries of Lightning's dict that differ between stages."""


@dataclass(frozen=True)
class Stages:
    """The ranks of one pipeline, which together hold the whole model."""

    group: dist.ProcessGroup
    leads: bool
    """Whether this is the pipeline of rank 0. Its ranks write the tensors of which other pipelines hold copies."""
    device: torch.device
    """The device on which tensors are sent."""
    weights: list[str]
    """Keys of the state dict that one process has, in its order."""

    @property
    def rank(self) -> int:
        """This rank's place in the pipeline."""
        return dist.get_rank(self.group)

    def merge(self, rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """(`rest` with the placeholders of all ranks, tensor name → the rank that writes it). Called on all ranks.

        `rest` is this rank's checkpoint with placeholders.
        """
        staged = {key: rest[key] for key in STAGED if key in rest}
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, staged, group=self.group)
        writers: dict[str, int] = {}
        merged = gathered[0]
        for rank, each in enumerate(gathered):
            for placeholder in placeholders_in(each):
                writers.setdefault(placeholder.name, rank)
            merged = _union(merged, each)
        for key in ("state_dict", AVERAGE):
            if key in merged:
                merged[key] = {name: merged[key][name] for name in self.weights if name in merged[key]}
        for optimizer in merged.get("optimizer_states", []):
            optimizer["state"] = dict(sorted(optimizer["state"].items()))
        return rest | merged, writers

    def bring_to_first(self, tensor: Tensor | None, rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Send the `tensor` of `rank` to the pipeline's first rank. Returns it there, and None elsewhere. A collective."""
        if self.rank == rank:
            assert tensor is not None
            if rank == 0:
                return tensor
            dist.send(tensor.detach().to(self.device).contiguous(), group=self.group, group_dst=0)
        elif self.rank == 0:
            received = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(received, group=self.group, group_src=rank)
            return received
        return None


def _union(a: Any, b: Any) -> Any:
    """Merge nested dicts and lists: the result has the keys of both. Where both have a value, it has the value of `a`."""
    if isinstance(a, dict) and isinstance(b, dict) and not is_placeholder(a):
        return {key: _union(a[key], b[key]) if key in a and key in b else value for key, value in {**a, **b}.items()}
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [_union(one, other) for one, other in zip(a, b, strict=True)]
    return a


def number_as_whole(state: dict[str, Any], own: list[list[str]], whole: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state_dict with the numbers that its parameters have on one process.

    Args:
        own: names of the optimizer's parameters, by group.
        whole: names of the parameters of the whole model's optimizer, by group. It has the same groups.
    """
    number = {name: i for i, name in enumerate(chain.from_iterable(whole))}
    names = list(chain.from_iterable(own))
    groups = zip(state["param_groups"], whole, strict=True)
    return {
        **state,
        "state": {number[names[i]]: values for i, values in state["state"].items()},
        "param_groups": [{**group, "params": [number[name] for name in of_group]} for group, of_group in groups],
    }


def number_as_own(saved: dict[str, Any], own: list[list[str]], whole: list[list[str]]) -> dict[str, Any]:
    """Undo `number_as_whole`: take the state of the parameters `own` out of the state_dict of the whole model's optimizer."""
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    number = dict(zip(chain.from_iterable(whole), numbers, strict=True))
    place = {name: i for i, name in enumerate(chain.from_iterable(own))}
    groups = zip(saved["param_groups"], own, strict=True)
    return {
        **saved,
        "state": {i: saved["state"][number[name]] for name, i in place.items() if number[name] in saved["state"]},
        "param_groups": [{**group, "params": [place[name] for name in of_group]} for group, of_group in groups],
    }

"""Checkpoints of a model whose pipeline stages are on different ranks. They equal the checkpoints of one process.

Each rank holds the tensors of its own stages, under the names that they have on one process, and an optimizer of its own
parameters. If several ranks of a pipeline hold a tied matrix, its values are equal, and the first of these ranks writes it.
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
"""Keys of Lightning's checkpoint dict whose values differ between the ranks of a pipeline."""


@dataclass(frozen=True)
class Stages:
    """Record of one pipeline, the ranks that together hold the stages of one copy of the model: its process group, and what a
    save has to know."""

    group: dist.ProcessGroup
    leads: bool
    """Whether rank 0 is in this pipeline. Other pipelines hold copies of its plain tensors; only this pipeline writes them."""
    device: torch.device
    """The device of tensors that ranks send to each other."""
    weights: list[str]
    """Keys of the whole model's state dict, in the order that the dict has on one process."""

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline's process group, from 0 on."""
        return dist.get_rank(self.group)

    def merge(self, rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """Merge the checkpoints of the pipeline's ranks. A collective. `rest` is this rank's checkpoint with placeholders.

        Returns (checkpoint with the placeholders of all ranks, tensor name → pipeline rank that writes the tensor).
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
        """Send `tensor` from pipeline rank `rank` to pipeline rank 0, which returns it. Other ranks return None. Collective."""
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
    """Merge two nested dicts: the result has the keys of `a` and `b`, and for keys in both the
    value of `a`, unless both values are dicts, or lists of equal length: these are merged likewise."""
    if isinstance(a, dict) and isinstance(b, dict) and not is_placeholder(a):
        return {key: _union(a[key], b[key]) if key in a and key in b else value for key, value in {**a, **b}.items()}
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [_union(one, other) for one, other in zip(a, b, strict=True)]
    return a


def number_as_whole(state: dict[str, Any], own: list[list[str]], whole: list[list[str]]) -> dict[str, Any]:
    """Renumber the parameters in an optimizer's state_dict as in an optimizer of the whole model; return the new state_dict.

    Args:
        own: for each parameter group, the names of this optimizer's parameters.
        whole: for each of the same groups, the names of its parameters in the whole model.
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
    """Take the state of the parameters `own` out of the state_dict `saved` of the whole model's optimizer, and renumber it.

    The inverse of `number_as_whole`, with the same `own` and `whole`: names of parameters by group.
    """
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    number = dict(zip(chain.from_iterable(whole), numbers, strict=True))
    place = {name: i for i, name in enumerate(chain.from_iterable(own))}
    groups = zip(saved["param_groups"], own, strict=True)
    return {
        **saved,
        "state": {i: saved["state"][number[name]] for name, i in place.items() if number[name] in saved["state"]},
        "param_groups": [{**group, "params": [place[name] for name in of_group]} for group, of_group in groups],
    }

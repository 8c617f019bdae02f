"""Facts about a run that do not change: which parameters the optimizer decays and trains, sizes, and initial weights."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from ._torch import local_part
from .contracts import fact_of_data


def setup_facts(trainer: Trainer, pl_module: LightningModule, rows: int) -> dict[str, float]:
    """Tag → value of each fact about the set-up; docs/reference/health.md explains the tags. Unknown facts are left out.

    A sharded parameter counts as a whole, but the facts about values of initial weights (`setup/initial_gain`, `alike_units`,
    `fresh_matrices`) are computed from this rank's shards. In a pipeline, the facts are about this rank's stage.

    Args:
        rows: number of rows of the embedding; 0 if there is none.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    owned = {p for group in groups for p in group["params"] if p.requires_grad}
    decayed = [p for group in groups if group.get("weight_decay") for p in group["params"] if p.ndim == 1]
    facts: dict[str, float] = {
        "setup/decayed_vectors": len(decayed),
        "setup/unoptimized": sum(p.numel() for p in pl_module.parameters() if p.requires_grad and p not in owned),
        "setup/ranks": trainer.world_size,
        "setup/frozen": sum(p.numel() for p in pl_module.parameters() if not p.requires_grad),
    }
    if known := [float(value) for group in groups if isinstance(value := group.get("weight_decay"), int | float)]:
        facts["setup/weight_decay"] = max(known)
    if vocabulary := fact_of_data(trainer, "vocab_size") or rows:
        facts["setup/vocab_size"] = vocabulary
    if (tokens := fact_of_data(trainer, "train_tokens")) is not None:
        facts["setup/train_tokens"] = tokens
    if trainer.global_step == 0:
        named = {name: module for name, module in pl_module.named_modules() if isinstance(module, nn.Linear)}
        named = {name: each for name, each in named.items() if _has_numbers(getattr(each, "weight", None))}
        linears, sizes = list(named.values()), {each: _root_mean_square(each) for each in named.values()}
        gains = [size * each.in_features**0.5 for each, size in sizes.items()]  # how much random inputs grow
        if gains:
            facts["setup/initial_gain"] = max(gains)
            facts["setup/alike_units"] = sum(bool(_alike(each)) for each in linears) / len(linears)
        if fresh := [_are_fresh(kind, sizes) for kind in _kinds(named) if len(kind) > 2]:
            facts["setup/fresh_matrices"] = sum(fresh) / len(fresh)
    return {name: float(value) for name, value in facts.items()}


def _kinds(linears: Mapping[str, nn.Linear]) -> list[list[nn.Linear]]:
    """Group Linears that have one shape and names that differ only in numbers: a group is the same layer of all blocks."""
    kinds: dict[tuple[str, torch.Size], list[nn.Linear]] = {}
    for name, linear in linears.items():
        kinds.setdefault((re.sub(r"\d+", "N", name), linear.weight.shape), []).append(linear)
    return list(kinds.values())


def _has_numbers(weight: Any) -> bool:
    """Whether a Linear's weight is a tensor of floating-point numbers. False under FSDP1 and for a quantised weight."""
    return isinstance(weight, Tensor) and weight.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _are_fresh(linears: list[nn.Linear], root_mean_squares: Mapping[nn.Linear, float]) -> bool:
    """Whether the Linears, each with n weights, look newly drawn: their root mean squares are nearly equal.

    Their standard deviation is then at most 2 · mean / sqrt(2 n), twice what is expected of random weights.
    """
    count = local_part(linears[0].weight).numel()
    sizes = [root_mean_squares[each] for each in linears]
    if not all(local_part(each.weight).numel() for each in linears) or not all(map(math.isfinite, sizes)):
        return False  # other ranks have them, or they are no numbers
    return statistics.stdev(sizes) <= 2 * statistics.mean(sizes) / math.sqrt(2 * count)


def _alike(linear: nn.Linear) -> bool:
    """Whether all output units have the same weights, not all 0. Such units get the same gradients, and so stay the same."""
    weight = local_part(linear.weight.detach())
    return len(weight) > 1 and bool((weight == weight[:1]).all() and weight.any())


def _root_mean_square(linear: nn.Linear) -> float:
    """Root mean square of this rank's shard of a Linear's weight; 0 if the shard is empty. bf16 and fp16 are cast to fp32."""
    weight = local_part(linear.weight.detach())
    norm = torch.linalg.vector_norm(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    return norm.item() / max(1, weight.numel()) ** 0.5

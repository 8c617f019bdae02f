"""What FSDP2 keeps whole on every rank: weights from forward to backward, gradients from one micro-batch to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lit_llm.core.dtensor import local_part
from lit_llm.core.memory import memory_bytes
from lit_llm.distributed.keep_rule import KeptWhole, keep

if TYPE_CHECKING:
    from lit_llm.distributed.mesh_strategy import MeshStrategy


def kept_whole(model: nn.Module, strategy: MeshStrategy, gathered_bytes: int) -> KeptWhole:
    """What to keep, the same on all ranks; call it on all of them. Prints one line if a setting is `auto`.

    What the plan of the run has chosen is kept. Ranks may have different memory. Then all keep what fits on each of them. On a
    CPU the ranks of a machine share its memory.

    Args:
        model: this rank's part of it, before FSDP2.
        gathered_bytes: bytes of its whole weights as FSDP2 gathers them.
    """
    gradient_bytes = sum(4 * local_part(p).numel() for p in model.parameters() if p.requires_grad)  # in fp32
    asked = strategy.reshard_after_forward, strategy.reduce_each_micro_batch
    decides = "auto" in asked
    memory = _memory_of_a_rank(strategy) if decides else 0
    kept = keep(
        *asked,
        pipeline=strategy.pipeline > 1,
        weight_bytes=gathered_bytes,
        gradient_bytes=gradient_bytes,
        memory=memory,
    )
    if not decides:
        return kept
    if (chosen := strategy.chosen) is not None:
        kept = KeptWhole(*(of_plan if each == "auto" else now for of_plan, now, each in zip(chosen, kept, asked, strict=True)))
    kept = KeptWhole(*_on_all_ranks(list(kept), strategy.root_device))
    gathers = "gathers weights once a step" if kept.weights else "gathers weights twice a micro-batch"
    reduces = "reduces gradients once a step" if kept.gradients else "reduces gradients after each micro-batch"
    rank_zero_info(
        f"FSDP2 {gathers} and {reduces}: of {memory / 1e9:,.1f} GB a rank, whole weights take {gathered_bytes / 1e9:,.2f} and "
        f"gradients {gradient_bytes / 1e9:,.2f} (--trainer.strategy.reshard_after_forward, .reduce_each_micro_batch)."
    )
    return kept


def _memory_of_a_rank(strategy: MeshStrategy) -> int:
    """Bytes."""
    memory = memory_bytes(strategy.root_device)
    return memory // strategy.num_processes if strategy.root_device.type == "cpu" else memory


def set_last_micro_batch(model: nn.Module, kept: KeptWhole, last: bool) -> None:
    """Before the backward pass of a micro-batch: whether gradients are reduced and weights freed after it."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            if kept.gradients:
                unit.set_requires_gradient_sync(last, recurse=False)
            else:  # summing shards before replicas add them takes little memory
                unit.set_requires_all_reduce(last, recurse=False)
            if kept.weights:
                unit.set_reshard_after_backward(last, recurse=False)


def _on_all_ranks(facts: list[bool], device: torch.device) -> list[bool]:
    """Which facts hold on every rank. A fake process group, which runs one rank alone, has no others to ask."""
    if dist.get_backend() == "fake":
        return facts
    held = torch.tensor(facts, dtype=torch.int32, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return [bool(each) for each in held.tolist()]

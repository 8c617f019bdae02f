"""Fully sharded data parallelism (FSDP2): parameters, gradients and optimizer state are split over ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT


def apply_fsdp(model: GPT | CustomModel, strategy: MeshStrategy) -> None:
    """Shard a model over `strategy.data_mesh`.

    Blocks and embedding are gathered when needed; other parameters stay gathered during a step. Gradients are reduced in
    fp32. With a two-dimensional mesh (replicas × shards) this is hybrid sharding (HSDP).
    """
    on_accelerator = strategy.root_device.type != "cpu"
    options: dict[str, Any] = {
        "mesh": strategy.data_mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_accelerator) if strategy.cpu_offload else OffloadPolicy(),
    }
    units: list[nn.Module] = list(model.blocks)
    if isinstance(model, GPT) and model.head is not None:
        units.insert(0, model.embedding)
    if not units:
        rank_zero_warn(
            f"{model.architecture.class_path} has no `blocks`: FSDP2 gathers the whole model for every forward pass."  # type: ignore[union-attr]
        )
    for unit in units:
        fully_shard(unit, reshard_after_forward=strategy.reshard_after_forward, **options)
    # The root holds norm and head (and a tied embedding), or everything but the blocks of a custom model. Forward uses it
    # last and backward first, so freeing it in between would only cost another gather.
    fully_shard(model, reshard_after_forward=False, **options)
    blocks: list[FSDPModule] = list(model.blocks)  # type: ignore[arg-type]
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + strategy.prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - strategy.prefetch) : i][::-1])

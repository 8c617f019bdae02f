"""A run in the planner's terms, taken from the objects that were built for it: of a recipe, or of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

from lit_llm.core._lightning import ddp_option
from lit_llm.core.errors import UserError
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.parallel_layout import Layout, layout_of_name, mesh_layout
from lit_llm.optim.torch_muon import TorchMuon
from lit_llm.plan.optimizer import STATE_OPTIONS, TORCH_MUON, Optimizer
from lit_llm.plan.run_settings import DataFacts, RunSettings, Schedule, canonical_precision
from lit_llm.plan.weights import PlannedModel
from lit_llm.training.objective import Objective


def run_settings(
    parts: Mapping[str, Any],
    model: PlannedModel,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    precision: Any,
    *,
    steps: int,
    data: DataFacts,
    **saves: Any,
) -> RunSettings:
    """The settings of a run.

    Args:
        parts: its objects by group of the recipe: at least data, loss and compute.
        optimizer: with any parameters.
        data: size of the data.
        saves: how checkpoints are saved, by the names in `RunSettings`.

    Raises:
        UserError: the planner does not know the precision.
    """
    module, loss, schedule, checkpoint = parts["data"], parts["loss"], parts.get("schedule"), parts.get("checkpoint")
    length, ramp = getattr(module, "block_size", None) or model.block_size, getattr(module, "ramp", None)
    objective: Objective | None = parts.get("objective")
    return RunSettings(
        model,
        planned_optimizer(optimizer),
        steps,
        getattr(module, "global_batch_size", None) or 1,
        getattr(module, "micro_batch_size", None),
        canonical_precision(precision),
        replace(parts["compute"]),
        layout,
        loss.chunk_size,
        loss_head="cross-entropy" if objective is None else objective.loss_head,
        reference_pass=objective is not None and objective.uses_reference and parts.get("lora") is not None,
        z_loss=bool(loss.z_loss),
        schedule=Schedule("Constant" if schedule is None else type(schedule).__name__),
        validate_every=getattr(parts.get("validation"), "every_n_steps", None),
        save_every=getattr(checkpoint, "every_n_steps", None),
        keep_last=getattr(checkpoint, "keep_last", 1),
        **saves,
        data=data,
        ramp=() if ramp is None else ramp.sequences(length),
        lora=parts.get("lora"),
        length=length,
        ema=parts.get("ema") is not None,
    )


def planned_optimizer(optimizer: torch.optim.Optimizer) -> Optimizer:
    """What of an optimizer affects memory."""
    groups = optimizer.param_groups
    if isinstance(optimizer, TorchMuon):
        return Optimizer(TORCH_MUON, ns_dtype="bfloat16")
    name = type(optimizer).__name__
    return Optimizer(
        name,
        more_states=max(sum(bool(group.get(option)) for option in STATE_OPTIONS) for group in groups),
        fused=all(group.get("fused") for group in groups) or name == "AdamW8bit",
        ns_dtype=next((group["ns_dtype"] for group in groups if "ns_dtype" in group), "auto"),
        normuon=any(group.get("normuon_beta2") is not None for group in groups),
    )


def layout_of(strategy: Any, devices: int, devices_per_node: int) -> Layout:
    """The layout of a Trainer strategy, an object or a name, on so many devices.

    Raises:
        UserError: the planner does not support the strategy, or its mesh does not fit the number of devices.
    """
    if isinstance(strategy, str):
        return layout_of_name(strategy, devices, devices_per_node)
    if isinstance(strategy, SingleDeviceStrategy):
        return layout_of_name("single", devices, devices_per_node)
    if isinstance(strategy, DDPStrategy):
        layout = layout_of_name("ddp", devices, devices_per_node)
        return replace(layout, bucket_copies=layout.bucket_copies and not ddp_option(strategy, "gradient_as_bucket_view"))
    if isinstance(strategy, FSDPStrategy):
        nodes = max(1, devices // devices_per_node)
        return replace(layout_of(MeshStrategy.from_fsdp1(strategy, nodes), devices, devices_per_node), strategy="fsdp")
    if not isinstance(strategy, MeshStrategy):
        raise UserError(f"the planner does not support {type(strategy).__name__} (--trainer.strategy)")
    return mesh_layout(
        strategy.sizes(devices),
        strategy.pipeline_layout,
        reshard_after_forward=strategy.reshard_after_forward,
        reduce_each_micro_batch=strategy.reduce_each_micro_batch,
        prefetch=strategy.prefetch,
        cpu_offload=strategy.cpu_offload,
        context_attention=strategy.context_attention,
        expert=strategy.expert,
    )

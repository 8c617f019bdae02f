"""A run in the planner's terms, taken from the objects that were built for it: of a recipe, or of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lit_llm.distributed.parallel_layout import Layout
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
        parts: the run's objects by group of the recipe: at least data, loss and compute.
        optimizer: the optimizer, with any parameters.
        data: size of the data.
        saves: values for the fields of `RunSettings` that say how checkpoints are saved.

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
    """The properties of an optimizer that affect memory."""
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

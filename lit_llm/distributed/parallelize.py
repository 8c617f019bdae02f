"""Prepare a model for training: float8, activation checkpointing, tensor parallelism, FSDP2, compile, in this order.

Each step changes modules and their `forward` in place, so that parameter names and checkpoints stay the same.
"""

from __future__ import annotations

import torch

from lit_llm.distributed.activation_checkpointing import apply_activation_checkpointing
from lit_llm.distributed.compile_blocks import compile_blocks
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.float8 import convert_to_float8, float8_problem
from lit_llm.distributed.fsdp import apply_fsdp
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.tensor_parallel import apply_tensor_parallel
from lit_llm.errors import UserError
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT


def parallelize(
    model: GPT | CustomModel, compute: ComputeConfig, device: torch.device, strategy: MeshStrategy | None = None
) -> None:
    """Prepare a model for training on `device`.

    Args:
        model: a GPT on the meta device, or a custom model with its weights.
        strategy: the mesh of processes; None: one process, or a strategy that replicates the model itself (DDP).

    Raises:
        UserError: if the device, or a model without `blocks`, does not support a setting.
    """
    if not len(model.blocks):
        asked = {
            "activation_checkpointing": compute.activation_checkpointing != "none",
            "compile": compute.compile,
            "float8": compute.float8,
        }
        if names := [f"compute.{name}" for name, wanted in asked.items() if wanted]:
            verb = "need" if len(names) > 1 else "needs"
            class_path = model.architecture.class_path  # type: ignore[union-attr]  # a GPT has at least one block
            raise UserError(
                f"{' and '.join(names)} {verb} the model's blocks, but {class_path} has none: name the nn.ModuleList of its "
                f"layers `blocks`, or remove --{names[0]}"
            )
    if compute.float8:
        if problem := float8_problem(device):
            raise UserError(problem)
        convert_to_float8(model)
    apply_activation_checkpointing(model, compute.activation_checkpointing)
    if strategy is not None and strategy.tensor_mesh is not None:
        assert isinstance(model, GPT)  # `preflight.layout` refuses custom models here
        apply_tensor_parallel(model, strategy.tensor_mesh)
    if strategy is not None and strategy.data_mesh is not None:
        apply_fsdp(model, strategy)
    if compute.compile:
        compile_blocks(model, device)

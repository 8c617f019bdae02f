"""Prepare a model for training.

The order is: kernel of attention, float8, expert parallelism, activation checkpointing, tensor and context parallelism, stages
of a pipeline, FSDP2, compile. Compiled tensor-parallel blocks get activation checkpointing last. Each step changes modules and
their `forward` in place, so that parameter names and checkpoints stay the same. The stages of a pipeline consist of modules of
the whole model, so that all steps apply to the modules of stages too.
"""

from __future__ import annotations

from functools import partial

import torch

from lit_llm.core.errors import UserError, refuse
from lit_llm.distributed.activation_checkpointing import apply_activation_checkpointing
from lit_llm.distributed.block_kernels import compile_blocks, convert_to_float8, float8_problem
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.context_parallel import apply_context_parallel
from lit_llm.distributed.expert_parallel import apply_expert_parallel
from lit_llm.distributed.fsdp import apply_fsdp, gathered_bytes, kept_whole, narrow_dtype
from lit_llm.distributed.layout_problems import expert_problems
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.parallel_layout import mesh_layout
from lit_llm.distributed.pipeline_parallel import PipelinedGPT
from lit_llm.distributed.tensor_parallel import apply_tensor_parallel
from lit_llm.models.attention_kernel_choice import activate_flash, attention_problem, flash_implementation
from lit_llm.models.custom import CustomModel, blocks_problem
from lit_llm.models.gpt import GPT


def parallelize(
    model: GPT | CustomModel, compute: ComputeConfig, device: torch.device, strategy: MeshStrategy | None = None
) -> GPT | CustomModel | PipelinedGPT:
    """Prepare a model for training on `device`. Returns the model or, in a pipeline, this rank's part of the model.

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
            assert isinstance(model, CustomModel)  # a GPT has at least one block
            raise UserError(blocks_problem(model.architecture.class_path, names))
    if strategy is not None and strategy.expert > 1:
        sizes = strategy.sizes(strategy.world_size)
        layout = mesh_layout(sizes, strategy.pipeline_layout, expert=strategy.expert)
        refuse(expert_problems(model.config if isinstance(model, GPT) else None, layout, compiled=compute.compile))
    if isinstance(model, GPT):
        if problem := attention_problem(model.config, compute.attention, device):
            raise UserError(problem)
        model.attention_kernel = compute.attention
        if flash := flash_implementation(model.config, compute.attention, device):
            activate_flash(flash)
    if compute.float8:
        if problem := float8_problem(device):
            raise UserError(problem)
        convert_to_float8(model)
    expert_mesh = None
    if strategy is not None and isinstance(model, GPT) and model.config.moe is not None:
        expert_mesh = apply_expert_parallel(model, strategy)
    recompute = partial(apply_activation_checkpointing, model, compute.activation_checkpointing)
    # torch 2.13 loses the mesh of DTensors that a graph recomputes, so a tensor-parallel block is recomputed outside its graph.
    in_graph = compute.activation_checkpointing == "cheap" or strategy is None or strategy.tensor_mesh is None
    if in_graph or not compute.compile:
        recompute()
    if strategy is not None and strategy.tensor_mesh is not None:
        assert isinstance(model, GPT)  # `layout_problems` refuses custom models here
        apply_tensor_parallel(model, strategy.tensor_mesh)
    if strategy is not None and strategy.context_mesh is not None:
        assert isinstance(model, GPT)  # as above
        apply_context_parallel(model, strategy.context_mesh, strategy.context_attention)
    prepared: GPT | CustomModel | PipelinedGPT = model
    if strategy is not None and strategy.pipeline_mesh is not None:
        assert isinstance(model, GPT)  # `layout_problems` refuses custom models here
        prepared = PipelinedGPT(model, strategy.pipeline_layout, strategy.pipeline_mesh)
    if strategy is not None and (strategy.data_mesh is not None or expert_mesh is not None):
        strategy.kept = kept_whole(prepared, strategy, gathered_bytes(prepared, narrow_dtype(prepared, strategy)))
        for part in prepared.stages if isinstance(prepared, PipelinedGPT) else [model]:
            apply_fsdp(part, strategy, expert_mesh)
    if compute.compile:
        compile_blocks(model, device)
        if not in_graph:
            recompute()
    return prepared

"""Activation checkpointing: recompute activations in the backward pass instead of storing them (Chen et al. 2016)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT


def apply_activation_checkpointing(model: GPT | CustomModel, mode: str | int) -> None:
    """Recompute in the backward pass the part of each block that `mode` names (`ComputeConfig.activation_checkpointing`)."""
    # Restoring random generators takes time, and a GPT without dropout does not use them.
    rng = not isinstance(model, GPT) or model.config.dropout > 0
    blocks = list(model.blocks)
    if mode == "attention":
        for block in blocks:
            _recompute(block.attention, preserve_rng_state=rng)  # type: ignore[arg-type]
    elif mode == "cheap":
        for block in blocks:
            _recompute(block, preserve_rng_state=rng, context_fn=partial(create_selective_checkpoint_contexts, _keep_expensive))
    elif mode != "none":
        for block in blocks[:: 1 if mode == "full" else int(mode)]:
            _recompute(block, preserve_rng_state=rng)


def _recompute(module: nn.Module, **options: Any) -> None:
    forward = module.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    module.forward = recomputed


_EXPENSIVE_NAMES = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"),
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math_for_mps",
    # Results of communication: recomputing them would communicate twice.
    *("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce"),
}


def _keep_expensive(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator.name().split(".")[0] in _EXPENSIVE_NAMES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

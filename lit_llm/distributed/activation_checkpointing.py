"""Activation checkpointing: recompute activations in the backward pass instead of storing them (Chen et al. 2016)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lit_llm.models.block import Block
from lit_llm.models.custom import CustomModel
from lit_llm.models.experts import Experts
from lit_llm.models.gpt import GPT


def apply_activation_checkpointing(model: GPT | CustomModel, mode: str | int) -> None:
    """Make the backward pass recompute activations of the model's blocks instead of storing them. Changes blocks in place.

    `mode`, a value of `ComputeConfig.activation_checkpointing`, selects the blocks and the activations."""
    rng = not isinstance(model, GPT)  # a GPT's dropout uses no generators, and restoring them takes time
    for i, block in enumerate(model.blocks):
        if recomputes(mode, i):
            recompute_block(block, mode, preserve_rng_state=rng)


def recomputes(mode: str | int, i: int) -> bool:
    """Whether the backward pass recomputes activations of block `i`. `mode` "none": of no block; k: of blocks 0, k, 2k, …."""
    return mode != "none" and (isinstance(mode, str) or i % mode == 0)


def recompute_block(block: nn.Module, mode: str | int, *, preserve_rng_state: bool) -> None:
    """Make the backward pass recompute some of a block's activations, by replacing the block's or its attention's `forward`.

    `mode` "attention": recompute attention. "cheap": all but the results of matrix products, attention and communication. Any
    other mode: all activations. `preserve_rng_state`: whether random numbers repeat, which takes time."""
    module: Any = block.attention if mode == "attention" else block
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if mode == "cheap":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_expensive)
    elif mode != "attention" and isinstance(block, Block) and isinstance(block.mlp, Experts) and block.mlp.is_shared:
        # Keep the numbers of rows that experts exchange, so that the host waits for the GPU only in the forward pass.
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, {_ROW_NUMBERS}))
    forward = module.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    module.forward = recomputed


_ROW_NUMBERS = "lit_llm::row_numbers"
_EXPENSIVE_NAMES = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"),
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math_for_mps",
    *("lit_llm::attention", "flex_attention", "lit_llm::grouped_linear", _ROW_NUMBERS),
    # Results of communication: recomputing them would communicate twice.
    *("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce"),
    "_c10d_functional::all_to_all_single",
}


def _policy(kept: set[str], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide for selective checkpointing: store an operator's result if its name is in `kept`; else recompute the result."""
    is_kept = operator.name().split(".")[0] in kept
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


keep_expensive = partial(_policy, _EXPENSIVE_NAMES)
"""The policy of mode cheap: store the results of matrix products, attention and communication, and recompute all others."""

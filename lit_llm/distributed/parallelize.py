"""What is applied to a built model before it trains, a GPT before it has memory.

float8, activation checkpointing, tensor parallelism, FSDP2, compile.

In that order. Everything works in place on modules and their `forward`, so that names of parameters, and with them
checkpoints, stay the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lit_llm.distributed.compute_config import ComputeConfig, float8_problem, no_compiler
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.errors import UserError
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import VocabularyShards


def parallelize(
    model: GPT | CustomModel, compute: ComputeConfig, device: torch.device, strategy: MeshStrategy | None = None
) -> None:
    """Prepare a GPT on the meta device, or an architecture of the user's with its weights, for training on `device`, on one
    process or, with a strategy, on its part of a mesh.

    Raises:
        UserError: the device, or a model without blocks, cannot do what is asked.
    """
    if not len(model.blocks):
        asked = {
            "activation_checkpointing": compute.activation_checkpointing != "none",
            "compile": compute.compile,
            "float8": compute.float8,
        }
        if names := [f"compute.{name}" for name, wanted in asked.items() if wanted]:
            raise UserError(
                f"{', '.join(names)} work on the model's blocks, and {model.architecture.class_path} has none: call the "  # type: ignore[union-attr]
                f"nn.ModuleList of its parts `blocks` (or leave --{names[0]} out)"
            )
    torch.set_float32_matmul_precision(compute.matmul_precision)
    if compute.float8:
        if problem := float8_problem(device):
            raise UserError(problem)
        multiply_in_float8(model)
    checkpoint_activations(model, compute.activation_checkpointing)
    if strategy is not None and strategy.tensor_mesh is not None:
        assert isinstance(model, GPT)  # `launch_checks.layout` refuses the others
        split_tensors(model, strategy.tensor_mesh)
    if strategy is not None and strategy.data_mesh is not None:
        shard(model, strategy)
    if compute.compile:
        compile_blocks(model, device)


# -- one device -------------------------------------------------------------------------------------------------------


def multiply_in_float8(model: GPT | CustomModel) -> None:
    """torchao's float8 training for the linear layers of the blocks; the head stays as it is (its loss needs the range)."""
    from torchao.float8 import convert_to_float8_training  # an extra: only those who ask for it need it

    # The kernels want both sizes in sixteens; torchao skips nothing by itself.
    convert_to_float8_training(
        model.blocks,
        module_filter_fn=lambda module, name: module.in_features % 16 == 0 and module.out_features % 16 == 0,
    )


def checkpoint_activations(model: GPT | CustomModel, mode: str | int) -> None:
    """Recompute in the backward pass what `mode` says (`ComputeConfig.activation_checkpointing`)."""
    rng = not isinstance(model, GPT) or model.config.dropout > 0  # restoring generators costs; without dropout nothing draws
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
    # What came over the wire is not sent twice.
    *("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce"),
}


def _keep_expensive(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator.name().split(".")[0] in _EXPENSIVE_NAMES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: GPT | CustomModel, device: torch.device) -> None:
    """torch.compile each block's forward: one compilation for all of them, and FSDP's hooks run outside it."""
    reason = no_compiler(device)
    if model.vocabulary_shards is not None:
        # The hooks of its inner modules would be compiled too, and torch 2.13 takes their distributed tensors for plain ones.
        reason = "it does not work with tensor parallelism yet"
    if reason:
        rank_zero_warn(f"compute.compile is off: {reason} (--compute.compile false).")
        return
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def split_tensors(model: GPT, mesh: DeviceMesh) -> None:
    """Megatron's tensor parallelism with sequence-parallel norms (Korthikanti et al. 2022, arXiv 2205.05198) over a 1-D mesh.

    Heads and hidden units are split by output columns and then input rows, the vocabulary by rows of embedding and head.
    Between those, each rank has the tokens (B, T / ranks, d) of its part of the sequence: norms, residuals and dropout work on
    those, an all-gather precedes and a reduce-scatter follows attention and MLP. The loss never gathers the logits.
    """
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": _GatheredNorm(),
    }
    if model.positions is not None:
        plan["positions"] = _SplitPositions()
    parallelize_module(model, mesh, plan)
    if model.head is not None:
        distribute_module(model.head, mesh, partial(_distribute, Shard(0)))
    for block in model.blocks:
        attention: nn.Module = block.attention  # type: ignore[assignment]
        gathered = PrepareModuleInput(
            input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        )
        block_plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": gathered,
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.project": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"mlp.{name}": ColwiseParallel() for name in ("up", "gate") if getattr(block.mlp, name) is not None},
            "mlp.project": RowwiseParallel(output_layouts=Shard(1)),
        }
        if isinstance(attention.query_norm, nn.RMSNorm):
            # On (B, T, H, h), of which a rank has some heads: to its weight that is what a part of the sequence is to others.
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            block_plan |= {"attention.query_norm": heads, "attention.key_norm": heads}
        parallelize_module(block, mesh, block_plan)
    rows = model.config.padded_vocab_size // mesh.size()
    model.vocabulary_shards = VocabularyShards(mesh.get_group(), mesh.get_local_rank() * rows)


class _SplitPositions(ParallelStyle):
    """A table that every rank has whole; it reads the rows of its part of the sequence: (1, T) → (1, T / ranks, d)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            partial(_distribute, Replicate()),
            lambda mod, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),  # type: ignore[arg-type]
            lambda mod, output, mesh: output.redistribute(placements=[Shard(1)]).to_local(),
        )


class _GatheredNorm(SequenceParallel):
    """The last norm: (B, T / ranks, d) in, the whole (B, T, d) out as a plain tensor, for the loss.

    Each rank's loss gives the gradient through its rows of the vocabulary only; that those are to be summed is said here.
    """

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: DTensor, device_mesh: DeviceMesh) -> Tensor:
        return outputs.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _distribute(placement: Replicate | Shard, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(distributed, requires_grad=parameter.requires_grad))


def tensor_parallel_problems(config: GPTConfig, ranks: int) -> list[str]:
    """Why a model cannot be split over so many tensor-parallel ranks, one sentence each."""
    found = []

    def check(what: str, size: int, flag: str) -> None:
        if size % ranks:
            fitting = max(k for k in range(1, ranks) if size % k == 0)
            found.append(
                f"tensor_parallel={ranks} does not divide {what} = {size}; the nearest smaller that does is {fitting} "
                f"(--trainer.strategy.tensor_parallel, or {flag})"
            )

    check("model.n_head", config.n_head, "--model.n_head")
    if config.kv_heads != config.n_head:
        check("model.n_kv_head", config.kv_heads, "--model.n_kv_head")
    check("the MLP's hidden width", config.hidden_width, "--model.mlp_width")
    check("model.block_size", config.block_size, "--model.block_size")
    if config.vocab_size is not None:
        check("the padded vocabulary", config.padded_vocab_size, "--model.pad_vocab_to")
    elif config.pad_vocab_to % ranks:
        check("model.pad_vocab_to", config.pad_vocab_to, "--model.pad_vocab_to")
    return found


# -- FSDP2 --------------------------------------------------------------------------------------------------------------


def shard(model: GPT | CustomModel, strategy: MeshStrategy) -> None:
    """FSDP2: each block is gathered when it is needed, and so is the embedding; the rest stays gathered through a step.

    Gradients are reduced in fp32. With a two-dimensional mesh (replicas × shards) it is hybrid sharding (HSDP).
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
            f"{model.architecture.class_path} has no blocks: FSDP2 shards it and gathers it whole for every forward pass."  # type: ignore[union-attr]
        )
    for unit in units:
        fully_shard(unit, reshard_after_forward=strategy.reshard_after_forward, **options)
    # The root: norm and head (with a tied embedding), and all but the blocks of an architecture of the user's, used at
    # the end of forward and at once in backward.
    fully_shard(model, reshard_after_forward=False, **options)
    blocks: list[FSDPModule] = list(model.blocks)  # type: ignore[arg-type]
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + strategy.prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - strategy.prefetch) : i][::-1])

"""Fully sharded data parallelism (FSDP2): parameters, gradients and optimizer state are split over ranks.

Within an optimizer step, ranks may still keep whole weights or whole gradients, as `keep_rule` decides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from lit_llm.core._torch import gather_in_own_dtype, placement_on, whole_parameters
from lit_llm.core.dtensor import local_part
from lit_llm.core.memory import memory_bytes
from lit_llm.distributed.keep_rule import KeptWhole, keep, sharded_dimension
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.pipeline_parallel import Stage
from lit_llm.models.custom import CustomModel
from lit_llm.models.experts import StackedLinear
from lit_llm.models.gpt import GPT


def apply_fsdp(model: GPT | CustomModel | Stage, strategy: MeshStrategy, expert_mesh: DeviceMesh | None = None) -> None:
    """Shard the parameters of a model or pipeline stage by FSDP2 over the ranks of `strategy.shard_mesh`, in place.

    Experts are sharded over `expert_mesh` if it is given. Blocks and embedding are gathered when needed; other parameters stay
    gathered during a step. A two-dimensional mesh (replicas × shards) gives hybrid sharding (HSDP).

    Under autocast, the matrices of a GPT's linear layers and experts are gathered in the compute dtype: half of fp32's bytes,
    and the same results, as autocast rounds these matrices anyway. All other parameters are gathered in their own dtype, in
    the same collective. Gradients are summed over micro-batches and reduced in fp32, or in float64 if weights are float64.
    `strategy.kept` says whether weights and gradients stay whole within a step.
    """
    on_accelerator = strategy.root_device.type != "cpu"
    narrow = narrow_dtype(model, strategy)
    wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    options: dict[str, Any] = {
        "mesh": strategy.shard_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_accelerator) if strategy.cpu_offload else OffloadPolicy(),
    }
    stacked = [p for module in model.modules() if isinstance(module, StackedLinear) for p in module.parameters()]
    if stacked:
        mesh = strategy.shard_mesh if expert_mesh is None else expert_mesh
        shards = mesh.size(mesh.ndim - 1)
        placements = {p: Shard(sharded_dimension(local_part(p).shape, shards)) for p in stacked}
        options["shard_placement_fn"] = placement_on(expert_mesh, placements)
    units: list[nn.Module] = list(model.blocks)
    if isinstance(model, GPT | Stage) and model.embedding is not None and not model.ties_head:
        units.insert(0, model.embedding)
    if not units:
        rank_zero_warn(
            f"{model.architecture.class_path} has no `blocks`: FSDP2 gathers the whole model for every forward pass."  # type: ignore[union-attr]
        )
    for unit in units:
        fully_shard(unit, reshard_after_forward=not strategy.kept.weights, **options)
        if isinstance(unit, nn.Embedding):
            unit.set_unshard_in_backward(False)  # type: ignore[operator]  # its gradient needs ids only
    # The root has norm and head (and a tied embedding); of a custom model, all but the blocks. The forward pass uses these
    # parameters last and the backward pass first, so freeing them in between would only cost another gather.
    fully_shard(model, reshard_after_forward=False, **options)
    for unit in (*units, model):
        if narrow is not None:
            gather_in_own_dtype(unit, _is_rounded)  # type: ignore[arg-type]
        _sum_gradients_in_fp32(unit)
    blocks: list[FSDPModule] = list(model.blocks)  # type: ignore[arg-type]
    for i, block in enumerate(blocks):
        # Blocks that predict ahead are not prefetched: validation leaves them out, and their gathered weights would stay.
        following = blocks[i + 1 : i + 1 + strategy.prefetch]
        block.set_modules_to_forward_prefetch([each for each in following if getattr(each, "ahead", None) is None])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - strategy.prefetch) : i][::-1])


def kept_whole(model: nn.Module, strategy: MeshStrategy, gathered_bytes: int) -> KeptWhole:
    """Decide whether ranks keep whole weights and whole gradients within an optimizer step, as `keep` does.

    A collective: all ranks decide the same. If ranks differ in memory, weights or gradients stay whole only if every rank has
    room. Ranks on CPUs share the machine's memory. A setting that is `auto` follows the run's plan (`strategy.chosen`) if there
    is one. If any setting is `auto`, a printed line reports the decision.

    Args:
        model: this rank's part of the model, before FSDP2 shards the parameters.
        gathered_bytes: bytes of all weights of this rank's part, in the dtypes in which FSDP2 gathers weights.
    """
    gradient_bytes = sum(4 * local_part(p).numel() for p in model.parameters() if p.requires_grad)  # in fp32
    asked = strategy.reshard_after_forward, strategy.reduce_each_micro_batch
    memory = memory_bytes(strategy.root_device) if "auto" in asked else 0
    if strategy.root_device.type == "cpu":
        memory //= strategy.num_processes
    pipeline = strategy.pipeline > 1
    kept = keep(*asked, pipeline=pipeline, weight_bytes=gathered_bytes, gradient_bytes=gradient_bytes, memory=memory)
    if "auto" not in asked:
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


def _on_all_ranks(facts: list[bool], device: torch.device) -> list[bool]:
    """Return for each of `facts` whether it is True on every rank. A collective. With a fake process group: `facts` itself."""
    if dist.get_backend() == "fake":
        return facts
    flags = torch.tensor(facts, dtype=torch.int32, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return [bool(each) for each in flags.tolist()]


_ROUNDED = (nn.Linear, StackedLinear)
"""The classes of modules whose parameters autocast rounds before every use."""


def narrow_dtype(model: nn.Module, strategy: MeshStrategy) -> torch.dtype | None:
    """The dtype in which FSDP2 gathers the matrices of linear layers; None: the dtype of the parameters.

    A custom model may use a linear layer's weight outside autocast, so the weights of custom models keep their dtype.
    """
    return None if isinstance(model, CustomModel) else strategy.autocast_dtype


def gathered_bytes(model: nn.Module, narrow: torch.dtype | None) -> int:
    """Bytes of all weights of `model` in the dtypes in which FSDP2 gathers them. Call this before FSDP2 shards the model.

    `narrow`: the dtype in which weights of linear layers are gathered; None: their own dtype."""
    linear = {id(p) for module in model.modules() if isinstance(module, _ROUNDED) for p in module.parameters(recurse=False)}
    other = {id(p) for m in model.modules() if not isinstance(m, _ROUNDED) for p in m.parameters(recurse=False)}
    return sum(
        local_part(p).numel() * (narrow.itemsize if narrow and id(p) in linear - other else p.element_size())
        for p in model.parameters()
    )


def _is_rounded(owners: list[nn.Module]) -> bool:
    """Whether autocast rounds a parameter before every use: whether all modules that share it (`owners`) are linear layers.

    So it is False for an embedding that is tied to the head."""
    return all(isinstance(owner, _ROUNDED) for owner in owners)


def _sum_gradients_in_fp32(unit: nn.Module) -> None:
    """Make torch sum in fp32, as one process does, the gradients of the weights of `unit` that FSDP2 gathers in 16 bits."""

    def set_once(module: nn.Module, args: Any) -> None:  # whole weights exist from the first forward pass on
        for parameter in whole_parameters(unit):  # type: ignore[arg-type]
            if parameter.dtype.itemsize < torch.float32.itemsize:
                parameter.grad_dtype = torch.float32
        handle.remove()

    handle = unit.register_forward_pre_hook(set_once)

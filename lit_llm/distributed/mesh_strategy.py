"""The Lightning strategy for meshes of processes: FSDP2, HSDP and tensor parallelism, also combined."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_llm._lightning import (
    checkpoints_activations,
    connect_processes,
    saves_shards,
    set_device_mesh,
    set_process_group_backend,
)
from lit_llm._torch import HYBRID_SHARD_GRAD_OP, flatten_mesh
from lit_llm.checkpoint.io import FolderCheckpointIO
from lit_llm.checkpoint.load_weights import copy_weights
from lit_llm.checkpoint.sharded import split
from lit_llm.dtensor import fill_
from lit_llm.errors import UserError
from lit_llm.mesh_sizes import mesh_sizes

DIMENSIONS = ("replicate", "shard", "tensor_parallel")
_RESHARD = {  # FSDP1's sharding strategies: whether weights are freed between forward and backward
    ShardingStrategy.FULL_SHARD: True,
    ShardingStrategy.HYBRID_SHARD: True,
    ShardingStrategy.SHARD_GRAD_OP: False,
    HYBRID_SHARD_GRAD_OP: False,
}
# FSDP1 settings that FSDP2 does not need or that `fsdp.py` sets.
_IGNORED_FSDP1_SETTINGS = {
    *("auto_wrap_policy", "use_orig_params", "device_id", "sync_module_states", "forward_prefetch", "backward_prefetch"),
    "limit_all_gathers",
}
_WRITE_TIMEOUT = timedelta(hours=1)  # for the slowest rank to write its part of a checkpoint


class MeshStrategy(ModelParallelStrategy):
    """A mesh of `replicate` × `shard` × `tensor_parallel` processes.

    Ranks along `shard` each hold a part of every parameter, gradient and optimizer state (FSDP2). Ranks along `replicate` hold
    equal parts: with shard 1 this is plain data parallelism, with more it is HSDP. Ranks along `tensor_parallel` process
    the same samples, each with a part of every matrix. Ranks are numbered along `tensor_parallel` first, then `shard`, so that
    the dimensions that communicate most stay on one machine.

    The LightningModule applies the mesh in `configure_model` (as `lit_llm.distributed.parallelize` does). `device_mesh` has
    these three dimensions and the flattened `data_parallel`. A module with a parameter that is not distributed is
    refused, because its copies would diverge.

    Checkpoints equal those of any other strategy: rank 0 writes whole tensors, or with `sharded_checkpoints` every rank writes
    its part. Both load on any mesh and on one process.

    Args:
        replicate: number of replicas of the sharded model.
        shard: number of ranks that share one replica. "auto": all remaining ranks.
        tensor_parallel: number of ranks that share each matrix.
        reshard_after_forward: free a block's gathered weights after its forward pass and gather them again for backward.
            False: keep them, which saves a gather and needs more memory.
        prefetch: number of blocks to gather ahead.
        cpu_offload: keep shards, gradients and optimizer state in host memory.

    Raises:
        UserError: if the product of the sizes is not the number of processes, or a model is not sharded.
    """

    def __init__(
        self,
        replicate: int = 1,
        shard: int | Literal["auto"] = "auto",
        tensor_parallel: int = 1,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        cpu_offload: bool = False,
    ) -> None:
        for name, value in (("replicate", replicate), ("shard", shard), ("tensor_parallel", tensor_parallel)):
            if value != "auto" and value < 1:
                raise UserError(f"{name} is {value}, but must be at least 1 (--trainer.strategy.{name}).")
        if prefetch < 0:
            raise UserError(f"prefetch is {prefetch}, but must not be negative (--trainer.strategy.prefetch).")
        super().__init__(save_distributed_checkpoint=False)
        self.replicate, self.shard, self.tensor_parallel = replicate, shard, tensor_parallel
        self.reshard_after_forward, self.prefetch, self.cpu_offload = reshard_after_forward, prefetch, cpu_offload
        self.sharded_checkpoints = False
        self._writers: Any = None  # gloo group for writing sharded checkpoints, used by one thread at a time

    @classmethod
    def from_fsdp1(cls, strategy: str | FSDPStrategy, num_nodes: int) -> MeshStrategy:
        """The MeshStrategy equivalent to a configured FSDPStrategy of Lightning (FSDP1).

        FSDP1 itself is not used: it flattens parameters, so Muon and weight decay by shape would be silently wrong.

        Raises:
            UserError: if a setting has no counterpart here.
        """
        if isinstance(strategy, str):
            return cls(cpu_offload=strategy == "fsdp_cpu_offload")
        others = {
            "an activation checkpointing policy": (
                checkpoints_activations(strategy),
                "use --compute.activation_checkpointing",
            ),
            "mixed_precision": (strategy.mixed_precision, "use --trainer.precision"),
            **{
                name: (value, "see docs/clusters.md")
                for name, value in strategy.kwargs.items()
                if name not in _IGNORED_FSDP1_SETTINGS
            },
        }
        for name, (value, instead) in others.items():
            if value:
                raise UserError(f"MeshStrategy, which replaces FSDPStrategy, does not support its {name}: {instead}.")
        kind = strategy.sharding_strategy
        if kind not in _RESHARD:
            raise UserError(
                f"FSDPStrategy's sharding_strategy {kind.name} has no counterpart in MeshStrategy. Use one of "
                f"{', '.join(known.name for known in _RESHARD)}, or --trainer.strategy ddp to keep everything on every rank."
            )
        mesh = cls(
            replicate=num_nodes if "HYBRID" in kind.name else 1,
            reshard_after_forward=_RESHARD[kind],
            cpu_offload=strategy.cpu_offload is not None and strategy.cpu_offload.offload_params,
        )
        mesh.sharded_checkpoints = saves_shards(strategy)
        return mesh

    # -- the mesh ---------------------------------------------------------------------------------------------------

    def sizes(self, world_size: int) -> tuple[int, int, int]:
        """(replicate, shard, tensor_parallel) on `world_size` processes.

        Raises:
            UserError: if their product is not `world_size`.
        """
        return mesh_sizes(self.replicate, self.shard, self.tensor_parallel, world_size)

    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.parallel_devices is not None
        if self.cpu_offload and self.root_device.type == "cuda":
            set_process_group_backend(self, "cpu:gloo,cuda:nccl")  # gloo reduces gradient norms in host memory
        connect_processes(self)
        mesh = init_device_mesh(self.root_device.type, self.sizes(self.world_size), mesh_dim_names=DIMENSIONS)
        set_device_mesh(self, mesh)
        self._data_parallel_mesh = flatten_mesh(mesh["replicate", "shard"], "data_parallel")  # Lightning expects this name
        if self.tensor_parallel > 1:
            flatten_mesh(mesh["shard", "tensor_parallel"])  # so that a norm over both needs one all-reduce
        if self.sharded_checkpoints:
            self._writers = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The ranks that share each matrix; None without tensor parallelism."""
        return self.device_mesh["tensor_parallel"] if self.tensor_parallel > 1 else None

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """The ranks of FSDP2: shards, or replicas × shards. None if there is only one rank and no offload."""
        if self._data_parallel_mesh.size() == 1 and not self.cpu_offload:
            return None
        return self.device_mesh["shard"] if self.replicate == 1 else self.device_mesh["replicate", "shard"]

    @property
    def random_rank(self) -> int:
        """Seed offset of this rank. Unique, because tensor-parallel ranks also hold different tokens and heads."""
        return self.global_rank

    @property
    def parameter_device(self) -> torch.device:
        """Device of the model's shards."""
        return torch.device("cpu") if self.cpu_offload else self.root_device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self._data_parallel_mesh
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    # -- the model --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert self.model is not None
        if self.tensor_mesh is None and self.data_mesh is None:
            return
        whole = [name for name, parameter in self.model.named_parameters() if not isinstance(parameter, DTensor)]
        if whole:
            more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
            raise UserError(
                f"MeshStrategy has {self.world_size} processes, but {', '.join(whole[:3])}{more} of "
                f"{type(self.lightning_module).__name__} is not distributed: each process would train its own copy. Apply "
                "fully_shard or parallelize_module in configure_model, or use --trainer.strategy ddp."
            )

    def model_to_device(self) -> None:
        assert self.model is not None
        if not self.cpu_offload:
            super().model_to_device()
            return
        for module in self.model.modules():  # FSDP moves parameters, but not buffers
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.root_device))

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Distributed tensors by name. `save_checkpoint` gathers them or writes the parts."""
        assert self.model is not None
        return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state_dict. Parameters are numbered in the order of the groups, as on one process."""
        return (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint. Called on all ranks."""
        path = Path(self.broadcast(str(filepath)))
        if self.sharded_checkpoints and isinstance(self.checkpoint_io, FolderCheckpointIO):
            self.checkpoint_io.save_checkpoint(split(checkpoint), path, storage_options=self._writers)
            return
        whole = _whole(checkpoint, keep=self.is_global_zero)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint. Tensors stay on disk if possible: each rank reads only its own parts."""
        path = Path(self.broadcast(str(checkpoint_path)))
        if isinstance(self.checkpoint_io, FolderCheckpointIO):
            return self.checkpoint_io.load_checkpoint(path, lazy=True)
        return self.checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        copy_weights(self.model.state_dict(), checkpoint["state_dict"], "the checkpoint (--resume)", strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            if len(parameters) != len(numbers):
                raise UserError(
                    f"The checkpoint's optimizer has {len(numbers)} parameters, but this one has {len(parameters)} "
                    "(--optimizer)."
                )
            state = {
                number: {key: _part_of(value, parameter) for key, value in saved["state"][number].items()}
                for number, parameter in zip(numbers, parameters, strict=True)
                if number in saved["state"]
            }
            optimizer.load_state_dict({**saved, "state": state})

    def teardown(self) -> None:
        self.checkpoint_io.teardown()  # waits for running writes; Lightning does not call it here
        super().teardown()


def _whole(tree: Any, *, keep: bool) -> Any:
    """Gather the distributed tensors in nested dicts and lists one by one: into host memory if `keep`, else drop each."""
    if isinstance(tree, DTensor):
        full = tree.full_tensor()  # collective
        return full.cpu() if keep else None
    if isinstance(tree, dict):
        return {key: _whole(value, keep=keep) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_whole(value, keep=keep) for value in tree]
    return tree


def _part_of(value: Any, parameter: Tensor) -> Any:
    """This rank's part of an optimizer state, distributed like the parameter. A value of another shape stays whole."""
    if not isinstance(parameter, DTensor) or not hasattr(value, "shape") or value.shape != parameter.shape:
        return value[...] if hasattr(value, "shape") and not isinstance(value, Tensor) else value
    part = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)  # a copy, because the value may be a mapped file
    fill_(part, value)
    return part

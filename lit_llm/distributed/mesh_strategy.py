"""The Lightning strategy for meshes of processes: FSDP2, HSDP, context, tensor and pipeline parallelism, also combined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_llm.checkpoint.io import FolderCheckpointIO
from lit_llm.checkpoint.load_weights import copy_weights
from lit_llm.checkpoint.sharded import gather, split
from lit_llm.checkpoint.stages import Stages
from lit_llm.core._lightning import (
    checkpoints_activations,
    connect_processes,
    saves_shards,
    set_device_mesh,
    set_process_group_backend,
)
from lit_llm.core._torch import HYBRID_SHARD_GRAD_OP, flatten_mesh, unflatten_mesh
from lit_llm.core.dtensor import fill_, zeros_by_row
from lit_llm.core.errors import UserError, refuse
from lit_llm.core.mesh_sizes import MeshSizes, mesh_sizes
from lit_llm.core.number_domain import above, range_problems, whole
from lit_llm.distributed.keep_rule import KeptWhole
from lit_llm.distributed.layout_problems import clip_problem, loss_scale_problem
from lit_llm.distributed.pipeline_layers import KINDS, PipelineLayout, Schedule
from lit_llm.distributed.pipeline_parallel import PipelinedGPT, pipelined_part
from lit_llm.models.sequence_shard import ContextAttention

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
    """A mesh of `pipeline` × `replicate` × `shard` × `context` × `tensor_parallel` processes.

    Ranks along `shard` each hold a part of every parameter, gradient and optimizer state (FSDP2). Ranks along `replicate` hold
    equal parts: with shard 1 this is plain data parallelism, with more it is HSDP. Ranks along these two dimensions get
    different samples. Ranks along the other dimensions get the same samples: along `context` they process parts of each
    sequence (and shard parameters too), along `tensor_parallel` they have a part of every matrix, along `pipeline` a part of
    the layers. Ranks are numbered along `tensor_parallel` first, then `context`, `shard`, `replicate` and `pipeline`, so that
    the dimensions that communicate most stay on one machine.

    The LightningModule applies the mesh in `configure_model` (as `lit_llm.distributed.parallelize` does). `device_mesh` has
    `shard` and every dimension that is larger than 1. A module with a parameter that is not distributed is refused, because
    its copies would diverge.

    Checkpoints equal those of any other strategy: rank 0 writes whole tensors, or with `sharded_checkpoints` every rank writes
    its part. Both kinds load on any mesh and on one process.

    Args:
        replicate: number of replicas of the sharded model.
        shard: number of ranks that share one replica. "auto": all remaining ranks.
        context: number of ranks that share each sequence.
        context_attention: what context-parallel ranks exchange. gather: all keys and values, for any model. heads: each rank
            gets all positions of some heads by an all-to-all; `context` must divide a rank's key-value heads.
        tensor_parallel: number of ranks that share each matrix.
        pipeline: number of ranks that share the layers.
        expert: number of ranks along shard, context and tensor_parallel that share the experts of a layer (`model.moe`). Each
            rank sends its tokens' activations to the ranks with the tokens' experts. Ranks with the same experts shard them.
        reshard_after_forward: free a block's gathered weights after its forward pass and gather them again for backward.
            False: keep the weights until the step ends: fewer gathers than with True, more memory. "auto": False in a
            pipeline, or if the weights take at most an eighth of the device's memory and, on a GPU, the run then fits.
        reduce_each_micro_batch: reduce the gradients of each micro-batch over the shards (and once a step over replicas).
            False: once a step, which needs the memory of whole gradients in fp32. "auto": False in a pipeline, or if these
            gradients take at most an eighth of the device's memory and, on a GPU, the run then fits.
        prefetch: number of blocks whose weights FSDP2 gathers ahead.
        timeout_seconds: timeout of a collective of all processes. The groups of mesh dimensions have torch's default timeout.
        cpu_offload: keep shards, gradients and optimizer state in host memory.
        schedule: the order in which the ranks of a pipeline process micro-batches (docs/parallel.md).
        stages_per_rank: number of stages (groups of layers) on a pipeline rank. None: 1, or 2 if the schedule needs several.
        layers_first: number of layers in the first stage. None: balanced, with embedding and head counted as one layer each.
        layers_last: number of layers in the last stage. None: balanced.

    Raises:
        UserError: if the product of the sizes is not the number of processes, or a model is not sharded.
    """

    def __init__(
        self,
        replicate: Annotated[int, whole(1, 1_000_000)] = 1,
        shard: Annotated[int | Literal["auto"], whole(1, 1_000_000)] = "auto",
        context: Annotated[int, whole(1, 1_000_000)] = 1,
        tensor_parallel: Annotated[int, whole(1, 1_000_000)] = 1,
        pipeline: Annotated[int, whole(1, 1_000_000)] = 1,
        expert: Annotated[int, whole(1, 1_000_000)] = 1,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        reduce_each_micro_batch: bool | Literal["auto"] = "auto",
        context_attention: ContextAttention = "gather",
        prefetch: Annotated[int, whole(0, 10_000)] = 1,
        cpu_offload: bool = False,
        schedule: Schedule = "1f1b",
        stages_per_rank: Annotated[int | None, whole(1, 10_000)] = None,
        layers_first: Annotated[int | None, whole(1, 1_000_000)] = None,
        layers_last: Annotated[int | None, whole(1, 1_000_000)] = None,
        timeout_seconds: Annotated[float, above(0, 10**7)] = 1800.0,
    ) -> None:
        refuse(range_problems(MeshStrategy, "trainer.strategy", locals()))
        if context_attention not in get_args(ContextAttention):
            raise UserError(
                f"context_attention is {context_attention}, but must be gather or heads (--trainer.strategy.context_attention)."
            )
        if schedule not in KINDS:
            raise UserError(f"schedule is {schedule}, but must be one of {', '.join(KINDS)} (--trainer.strategy.schedule).")
        self.pipeline_layout = PipelineLayout(pipeline, schedule, stages_per_rank, layers_first, layers_last)
        refuse(self.pipeline_layout.problems())
        if pipeline > 1 and reduce_each_micro_batch is True:
            raise UserError(
                "reduce_each_micro_batch is true, but a pipeline reduces gradients once a step: use auto or false "
                "(--trainer.strategy.reduce_each_micro_batch)."
            )
        super().__init__(save_distributed_checkpoint=False, timeout=timedelta(seconds=timeout_seconds))
        self.replicate, self.shard, self.tensor_parallel = replicate, shard, tensor_parallel
        self.context, self.pipeline, self.context_attention = context, pipeline, context_attention
        self.expert = expert
        self.reshard_after_forward, self.prefetch, self.cpu_offload = reshard_after_forward, prefetch, cpu_offload
        self.reduce_each_micro_batch = reduce_each_micro_batch
        # `parallelize` sets `kept` if a setting is auto. A model that other code shards frees weights unless they are False.
        self.chosen: KeptWhole | None = None  # the choice of the run's plan, which knows what fits on a GPU
        self.kept = KeptWhole(weights=reshard_after_forward is False, gradients=reduce_each_micro_batch is False)
        self.sharded_checkpoints = False
        self.repeated_parameters: set[Tensor] = set()
        """This rank's parameters that an earlier rank of the pipeline has, too: a tied embedding."""
        self._pipelined: tuple[str, PipelinedGPT] | None = None  # (prefix of its names in the LightningModule, it)
        self._writers: Any = None  # gloo group for writing sharded checkpoints, used by one thread at a time

    @classmethod
    def from_fsdp1(cls, strategy: str | FSDPStrategy, num_nodes: int) -> MeshStrategy:
        """Return the MeshStrategy that does the same as `strategy`, an FSDPStrategy of Lightning (FSDP1) or its name.

        FSDP1 itself is not used: it flattens parameters, so Muon and weight decay by shape would be silently wrong.

        Raises:
            UserError: if a setting has no counterpart here.
        """
        if isinstance(strategy, str):
            return cls(reshard_after_forward=True, cpu_offload=strategy == "fsdp_cpu_offload")
        kept = {name: value for name, value in strategy.kwargs.items() if name not in _IGNORED_FSDP1_SETTINGS}
        others = {
            "an activation checkpointing policy": (checkpoints_activations(strategy), "use --compute.activation_checkpointing"),
            "mixed_precision": (strategy.mixed_precision, "use --trainer.precision"),
            **{name: (value, "see docs/clusters.md") for name, value in kept.items()},
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

    def sizes(self, world_size: int) -> MeshSizes:
        """The number of ranks in each dimension of the mesh on `world_size` processes.

        Raises:
            UserError: if the product of these sizes is not `world_size`.
        """
        names = ("replicate", "shard", "context", "tensor_parallel", "pipeline")
        return mesh_sizes(world_size, **{name: getattr(self, name) for name in names})

    def splits_model(self, world_size: int) -> bool:
        """Whether ranks hold different parts of the model. False also if the sizes do not fit the number of processes."""
        try:
            sizes = self.sizes(world_size)
        except UserError:
            return False
        return sizes.world > sizes.replicate

    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.parallel_devices is not None
        if self.cpu_offload and self.root_device.type == "cuda":
            set_process_group_backend(self, "cpu:gloo,cuda:nccl")  # gloo reduces gradient norms in host memory
        connect_processes(self)
        self._set_meshes(self.sizes(self.world_size))
        if self.sharded_checkpoints:
            self._writers = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)

    def _mesh(self, sizes: dict[str, int], always: str) -> DeviceMesh:
        """Make a mesh of all processes with dimensions `sizes` (name → size). Leave out size 1, except the dimension `always`.

        Each dimension is a process group, which costs time at the start (and with gloo, threads).
        """
        used = {name: size for name, size in sizes.items() if size > 1 or name == always}
        return init_device_mesh(self.root_device.type, tuple(used.values()), mesh_dim_names=tuple(used))

    def _set_meshes(self, sizes: MeshSizes) -> None:
        together = sizes._asdict()
        together["shard"] *= together.pop("context")  # FSDP2 needs shard × context as one dimension, and meshes of one root
        mesh = shards = self._mesh(together, "shard")
        if sizes.context > 1:
            mesh = unflatten_mesh(shards, "shard", {"shard": sizes.shard, "context": sizes.context})
        set_device_mesh(self, mesh)
        if sizes.replicate == 1:
            self.shard_mesh, self._data_parallel_mesh = shards["shard"], mesh["shard"]
        else:
            self.shard_mesh = shards["replicate", "shard"]
            self._data_parallel_mesh = flatten_mesh(mesh["replicate", "shard"], "data_parallel")
        if sizes.tensor_parallel > 1 and sizes.data_parallel * sizes.context > 1:
            flatten_mesh(shards["shard", "tensor_parallel"])  # so that a norm over both needs one all-reduce

    def expert_meshes(self) -> tuple[DeviceMesh, DeviceMesh | None]:
        """Make two meshes: (ranks with the same experts, which FSDP2 shards over them; ranks that share a layer's experts).

        The second is None if `expert` is 1. Both are parts of a new mesh of all ranks, in which neighbours share experts. A
        collective; call it once.
        """
        sizes = self.sizes(self.world_size)
        among = sizes.shard * sizes.context * sizes.tensor_parallel
        outer = {"pipeline": sizes.pipeline, "replicate": sizes.replicate}
        mesh = self._mesh({**outer, "expert_shard": among // self.expert, "expert": self.expert}, "expert_shard")
        holders = mesh["replicate", "expert_shard"] if sizes.replicate > 1 else mesh["expert_shard"]
        return holders, mesh["expert"] if self.expert > 1 else None

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The ranks that share each matrix; None without tensor parallelism."""
        return self.device_mesh["tensor_parallel"] if self.tensor_parallel > 1 else None

    @property
    def context_mesh(self) -> DeviceMesh | None:
        """The ranks that share each sequence; None without context parallelism."""
        return self.device_mesh["context"] if self.context > 1 else None

    @property
    def pipeline_mesh(self) -> DeviceMesh | None:
        """The ranks that share the layers; None without pipeline parallelism."""
        return self.device_mesh["pipeline"] if self.pipeline > 1 else None

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """The mesh of FSDP2: shard · context ranks, or replicate × (shard · context). None if all three are 1 and `cpu_offload`
        is off."""
        if self._data_parallel_mesh.size() * self.context == 1 and not self.cpu_offload:
            return None
        return self.shard_mesh

    @property
    def loss_ranks(self) -> int:
        """Number of ranks whose loss sums count: in each pipeline one rank, because the sums of its other ranks are zeros."""
        return self.world_size // self.pipeline

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of matrix products under autocast (bf16-mixed, 16-mixed); None without autocast."""
        return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(self.precision_plugin.precision))

    @property
    def batch_parts(self) -> int:
        """Number of ranks (along `context` and `pipeline`) that share a batch, and over which its loss sums are spread."""
        return self.context * self.pipeline

    @property
    def parameter_device(self) -> torch.device:
        """The device of this rank's shards of the parameters: the CPU with `cpu_offload`, else the rank's own device."""
        return torch.device("cpu") if self.cpu_offload else self.root_device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self._data_parallel_mesh
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    # -- the model --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        if problem := clip_problem(self.pipeline, trainer.gradient_clip_val):
            raise UserError(problem)
        if self.pipeline > 1 and getattr(self.precision_plugin, "scaler", None) is not None:
            raise UserError(loss_scale_problem(self.pipeline))
        super().setup(trainer)
        assert self.model is not None
        self._pipelined = pipelined_part(self.model)
        if self._pipelined is not None:
            self.repeated_parameters = self._pipelined[1].repeated_parameters()
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

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context manager for the backward pass of a micro-batch that is not the last of its optimizer step.

        Within it, FSDP2 does not reduce gradients over shards if `kept.gradients` is true (if it is false, not over replicas),
        and does not free whole weights after the backward pass if `kept.weights` is true."""
        assert self.model is not None
        set_last_micro_batch(self.model, self.kept, False)
        try:
            yield
        finally:
            set_last_micro_batch(self.model, self.kept, True)

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
        """The LightningModule's state dict. Its tensors are DTensors, which `save_checkpoint` gathers or writes by parts."""
        assert self.model is not None
        return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state_dict, with parameters numbered as in a run on one process, also in a pipeline."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return plain.state_dict() if self._pipelined is None else self._pipelined[1].optimizer_state(plain)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint: rank 0 writes whole tensors or, if `sharded_checkpoints`, every rank its parts. A collective."""
        path = Path(self.broadcast(str(filepath)))
        if self.sharded_checkpoints and isinstance(self.checkpoint_io, FolderCheckpointIO):
            self.checkpoint_io.save_checkpoint(split(checkpoint, self._stages), path, storage_options=self._writers)
            return
        whole = gather(checkpoint, keep=self.is_global_zero, stages=self._stages)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint on all ranks. Tensors stay on disk until they are read, so each rank reads only its own part."""
        path = Path(self.broadcast(str(checkpoint_path)))
        if isinstance(self.checkpoint_io, FolderCheckpointIO):
            return self.checkpoint_io.load_checkpoint(path, lazy=True)
        return self.checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        own = self._whole_weights | self.model.state_dict()
        copy_weights(own, checkpoint["state_dict"], "the checkpoint (--resume)", strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            groups = [parameters] if self._pipelined is None else self._pipelined[1].optimizer_groups
            expected = sum(map(len, groups))
            if expected != (there := sum(len(group["params"]) for group in saved["param_groups"])):
                raise UserError(
                    f"The checkpoint's optimizer has {there} parameters, but this one has {expected} (--optimizer)."
                )
            if self._pipelined is not None:
                saved = self._pipelined[1].own_optimizer_state(saved, optimizer)
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            state = {
                number: {key: _part_of(value, parameter) for key, value in saved["state"][number].items()}
                for number, parameter in zip(numbers, parameters, strict=True)
                if number in saved["state"]
            }
            optimizer.load_state_dict({**saved, "state": state})

    @property
    def _stages(self) -> Stages | None:
        """The ranks with the other stages of the same pipeline, for checkpoints; None without pipeline parallelism."""
        if self.pipeline_mesh is None:
            return None
        group = self.pipeline_mesh.get_group()
        leads = self.global_rank % (self.world_size // self.pipeline) == 0  # `pipeline` is the outermost dimension
        return Stages(group, leads, self.root_device, list(self._whole_weights))

    @property
    def _whole_weights(self) -> dict[str, Tensor]:
        """In a pipeline, the state dict of the whole model with tensors without data (meta device). Without a pipeline: {}."""
        return {} if self._pipelined is None else self._pipelined[1].whole_state_dict(self._pipelined[0])

    def teardown(self) -> None:
        self.checkpoint_io.teardown()  # waits for running writes; Lightning's ModelParallelStrategy does not call it
        super().teardown()


def _part_of(value: Any, parameter: Tensor) -> Any:
    """Return this rank's part of `value`, a tensor of an optimizer's state for `parameter`, split as the parameter is.

    Values of other shapes stay whole. One number per row of stacked matrices (E, r, c) is split as the experts are."""
    shape = getattr(value, "shape", None)
    if isinstance(parameter, DTensor) and parameter.ndim == 3 and parameter.shape != shape == (*parameter.shape[:2], 1):
        parameter = zeros_by_row(parameter)  # NorMuon keeps one number per row
    if not isinstance(parameter, DTensor) or not hasattr(value, "shape") or value.shape != parameter.shape:
        return value[...] if hasattr(value, "shape") and not isinstance(value, Tensor) else value
    part = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)  # a copy, because the value may be a mapped file
    fill_(part, value)
    return part


def loss_scaling(device_type: str) -> MixedPrecision:
    """Return Lightning's precision plugin for 16-mixed on CPUs and under MeshStrategy, where Lightning does not allow it.

    The plugin does fp16 autocast with dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740).
    torch's GradScaler supports distributed gradients: an overflow on one rank skips the step on all ranks of the tensor.
    """
    return MixedPrecision("16-mixed", device_type, scaler=torch.amp.GradScaler(device_type))


def set_last_micro_batch(model: torch.nn.Module, kept: KeptWhole, last: bool) -> None:
    """Tell all FSDP2 modules of `model` whether the next backward pass is the last of its optimizer step (`last`).

    If it is not, modules do not reduce gradients over shards if `kept.gradients` is true (if it is false, not over replicas),
    and do not free whole weights if `kept.weights` is true."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            if kept.gradients:
                unit.set_requires_gradient_sync(last, recurse=False)
            else:  # summing shards before replicas add them takes little memory
                unit.set_requires_all_reduce(last, recurse=False)
            if kept.weights:
                unit.set_reshard_after_backward(last, recurse=False)

"""Private names of torch. Only this module and `lit_llm.callbacks._torch`, for callbacks, use private names of torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

from lit_llm.callbacks._torch import IGNORED as IGNORED
from lit_llm.callbacks._torch import lerp_ as lerp_
from lit_llm.callbacks._torch import tensors_in as tensors_in

# In-place arithmetic on lists of tensors, one fused launch per list. torch's own optimizers use it.
foreach_add_ = torch._foreach_add_
foreach_lerp = torch._foreach_lerp
foreach_mul_ = torch._foreach_mul_
foreach_sign_ = torch._foreach_sign_

torch_newton_schulz = _zeropower_via_newtonschulz  # the iteration of torch.optim.Muon

# The kernels of attention and of LSTM layers on a CPU, for which FlopCounterMode has no formula.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention  # the GPUs' kernel, on tensors without data
CPU_LSTM = torch.ops.aten.mkldnn_rnn_layer
CPU_LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward


def seconds_of_compilation() -> float:
    """Seconds that torch.compile has taken in this process so far."""
    from torch._dynamo.utils import calculate_time_spent  # slow to import, but in memory once something was compiled

    return float(calculate_time_spent().get("total_wall_time", 0.0))


def compiled_graphs() -> tuple[int, int]:
    """(number of graphs that torch.compile has made in this process so far, number of graph breaks)."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


def cpu_has_bf16_units() -> bool:
    """Whether this processor multiplies matrices in bf16: AMX's tiles, or AVX-512's dot products."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


# Parts of tensors of any size without data, whose operations a dispatch mode sees: for the planner's trace.
DispatchMode = TorchDispatchMode
make_wrapper = torch.Tensor._make_wrapper_subclass
no_torch_function = torch._C._disabled_torch_function_impl
CAST = torch.ops.aten._to_copy
LOG_SOFTMAX = torch.ops.aten._log_softmax
LOCAL_SCALAR = torch.ops.aten._local_scalar_dense  # the operator of Tensor.item


def draws_random_numbers(operator: Any) -> bool:
    """Whether an operator draws random numbers, so that its results differ between equal calls."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def written_arguments(operator: Any, args: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """The arguments of a call `operator(*args, **options)` that the operator changes in place."""
    arguments = []
    for i, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            arguments.append(args[i] if i < len(args) else options.get(argument.name))
    return arguments


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer `name` of a module by any tensor, even if this tensor is no nn.Parameter."""
    kind = module._parameters if name in module._parameters else module._buffers
    kind[name] = tensor  # type: ignore[assignment]
    if isinstance(module, nn.RNNBase):  # an RNN holds its weights twice
        module._flat_weights = [getattr(module, each) for each in module._flat_weights_names]


COLLECTIVES = torch.ops._c10d_functional

HYBRID_SHARD_GRAD_OP = ShardingStrategy._HYBRID_SHARD_ZERO2  # FSDP1: shards in a node; weights stay gathered after forward


def gradients_of_inputs(outputs: list[Tensor], inputs: list[Tensor], weights: Iterable[nn.Parameter | Tensor]) -> Any:
    """Differentiate the sum of `outputs` by `inputs` only, for a pipeline stage that computes gradients of weights later.

    Return the gradients of `inputs`, and the values from which gradients of `weights` can be computed later.
    """
    gradients: Any = [torch.ones_like(output) for output in outputs]
    return stage_backward_input(outputs, gradients, inputs, iter(weights))  # type: ignore[arg-type]


def box_at(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset in the tensor) of the shard that a rank, at a mesh `coordinate`, has of a tensor of `shape`."""
    size, offset = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
    return tuple(size), tuple(offset)


def flatten_mesh(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Return a mesh of one dimension, called `name`, with the same ranks: one collective then reaches all of these ranks."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, dimension: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return a mesh with `dimension` split into new dimensions: `sizes` is name → size. The root mesh stays the same."""
    return mesh._unflatten(dimension, tuple(sizes.values()), tuple(sizes))


def take_unscaled_gradients(optimizer: Optimizer) -> None:
    """Make the fp16 loss scaler unscale a fused optimizer's gradients before the step, as it does for unfused optimizers."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def group_of(arguments: Iterable[Any]) -> dist.ProcessGroup:
    """Find the process group in the arguments of a collective operator, as an object, boxed, or by name. Return the group."""
    arguments = list(arguments)
    for argument in arguments:
        if isinstance(argument, dist.ProcessGroup):
            return argument
        if isinstance(argument, torch.ScriptObject):  # c10d boxes the group, and later the kind of reduction
            return dist.ProcessGroup.unbox(argument)
    name = [argument for argument in arguments if isinstance(argument, str)][-1]  # a reduction's kind comes before it
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # a NewType of str


def gather_in_own_dtype(unit: FSDPModule, unless: Callable[[list[nn.Module]], bool]) -> None:
    """Make an FSDP2 unit all-gather its parameters in their own dtypes, not in its `param_dtype`, still in one collective.

    Args:
        unless: modules that own a parameter → whether this parameter is still gathered in `param_dtype`.
    """
    for parameter in _parameters_of(unit):
        info = parameter._module_info
        if not unless([info.module, *info.shared_modules]):
            parameter.init_dtype_attrs = partial(_init_with_own_dtype, parameter)  # type: ignore[method-assign]


def whole_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """Return an FSDP2 unit's whole (gathered) parameters, which get gradients in backward. They exist from the first gather."""
    return [parameter.unsharded_param for parameter in _parameters_of(unit)]


def _parameters_of(unit: FSDPModule) -> list[FSDPParam]:
    return [parameter for group in unit._get_fsdp_state()._fsdp_param_groups for parameter in group.fsdp_params]


def placement_on(
    mesh: DeviceMesh | None, parameters: Mapping[nn.Parameter, Shard]
) -> Callable[[nn.Parameter], Shard | ShardPlacementResult | None]:
    """Return a `shard_placement_fn` for `fully_shard` that shards `parameters` otherwise than a unit's other parameters.

    Args:
        mesh: mesh for `parameters`, with dimensions (shards) or (replicas, shards). None: the mesh of the other parameters.
        parameters: parameter → `Shard` with the tensor dimension along which this parameter is sharded.
    """
    if mesh is None:
        return parameters.get
    info = (
        FSDPMeshInfo(mesh, shard_mesh_dim=0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    return lambda parameter: ShardPlacementResult(parameters[parameter], info) if parameter in parameters else None


def _init_with_own_dtype(parameter: FSDPParam, policy: MixedPrecisionPolicy) -> None:
    FSDPParam.init_dtype_attrs(parameter, replace(policy, param_dtype=None))


def all_gather_rows(rows: Tensor, ranks: int, group: str) -> Tensor:
    """All-gather rows in the order of the ranks: (r, …) → (ranks · r, …). torch.compile and CommDebugMode see the operator."""
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(rows.contiguous(), ranks, group))


def exchange_rows(rows: Tensor, ranks: int, group: str) -> Tensor:
    """Exchange equally many rows between all ranks (all-to-all): (ranks · r, …) → (ranks · r, …).

    Rows i · r to (i + 1) · r - 1 of the input go to rank i; the rows of the result with these numbers come from rank i.
    """
    sizes = [rows.size(0) // ranks] * ranks
    return send_rows(rows, sizes, sizes, group)


def send_rows(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Exchange rows between all ranks (all-to-all): (Σ sent, …) → (Σ received, …).

    The first sent[0] rows of the input go to rank 0, the next sent[1] rows to rank 1, and so on. The first received[0] rows of
    the result come from rank 0, and so on.
    """
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_to_all_single(rows.contiguous(), received, sent, group))


def sum_over_ranks(tensor: Tensor, group: str) -> Tensor:
    """Return the sum of a tensor over the ranks of a group. A collective. No gradient flows through the sum."""
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(tensor, "sum", group))


# NCCL's flight recorder if torch is built with it; without NCCL, the recorder of the other backends.
_of_all: Any = _distributed_c10d  # the stubs lack both
_record_of_collectives = getattr(_of_all, "_dump_nccl_trace_json", None) or _of_all._dump_fr_trace_json


def collectives_begun() -> int:
    """Number of collectives that this process has begun, in all groups."""
    status = json.loads(_record_of_collectives(includeCollectives=False)).get("pg_status", {})
    return sum(max(0, int(group["last_enqueued_collective"])) for group in status.values())


def last_collective() -> str | None:
    """Text on this process's last collective, send or receive: "gloo:all_reduce of [[3]] (unfinished)". None if none begun."""
    entries = json.loads(flight_record()).get("entries", [])
    if not entries:
        return None
    last = max(entries, key=lambda entry: entry["record_id"])
    ended = "finished" if last["retired"] else "unfinished"
    return f"{last['profiling_name']} of {last['input_sizes']} ({ended})"


def flight_record() -> bytes:
    """Return torch's record of the latest collectives of this process, as JSON."""
    return _record_of_collectives()

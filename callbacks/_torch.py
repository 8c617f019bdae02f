"""Helpers of the callbacks that need no Lightning. Only this file of the folder uses private names of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import profile

T = TypeVar("T")
AVERAGE = "ema_state_dict"
"""Checkpoint key of `EMA`'s average of the trainable parameters: a dict from the name in `state_dict` to an fp32 tensor."""
IGNORED = -100
"""The target of a position that a loss leaves out: the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts, depth first."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for each in nested:
            yield from tensors_in(each)
    elif isinstance(nested, dict):
        for each in nested.values():
            yield from tensors_in(each)


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device in place by a 0-d tensor, in one fused kernel if all tensors have the factor's dtype."""
    if all(tensor.dtype == factor.dtype for tensor in tensors):
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:  # a GPU would round a 0-d factor to the dtype of each
        tensor.mul_(factor.view((1,) * tensor.ndim))


def lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Set each tensor in place to tensor + weight · (end − tensor), in one fused kernel. `ends[i]` has `tensors[i]`'s dtype."""
    torch._foreach_lerp_(tensors, ends, weight)


def process_count() -> int:
    """Number of processes in the default process group; 1 if there is no group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(value: T) -> list[T]:
    """Return the `value` of each process, in the order of ranks. A collective; returns [value] if there is no process group."""
    values = [value] * process_count()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, which shares its memory (`to_local`); any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's shard of a parameter's gradient, redistributed to the parameter's placements. None: there is no gradient."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return None if grad is None else local_part(grad)


def local_box(tensor: DTensor) -> tuple[slice, ...]:
    """The slices, one per dimension, that cut this rank's shard out of the whole tensor. An empty shard has an empty slice.

    A shard is always one box, because FSDP2, tensor parallelism, and both together shard into contiguous chunks.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def after_gradients(call: Callable[[], None]) -> None:
    """Make the current backward pass call `call` when all gradients are computed. For use in a hook of the backward pass.

    DDP and FSDP2 queue their own calls later in the backward pass, so `call` runs before they wait for gradient reductions.
    """
    Variable._execution_engine.queue_callback(call)


def is_profiling() -> bool:
    """Whether a torch.profiler is recording."""
    return torch.autograd._profiler_enabled()


def profiler_events(recording: profile) -> Any:
    """The kineto events of a stopped profiler. This takes a tenth of the time that `recording.events()` takes."""
    return recording.profiler.kineto_results.events()  # type: ignore[union-attr]


def unscales_by_itself(optimizer: Optimizer) -> bool:
    """Whether, under fp16 loss scaling, the optimizer's own step unscales the gradients, as torch's fused optimizers do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def start_memory_history(entries: int) -> None:
    """Start to record allocations and frees of CUDA memory. torch keeps the last `entries` records."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def stop_memory_history(file: Path | None) -> None:
    """Write the records of CUDA memory to `file` (None: drop the records), then stop recording."""
    if file is not None:
        torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)


def prepare_reduction(ddp: DistributedDataParallel) -> None:
    """Prepare DDP to reduce the gradients of the next backward pass, as its forward pass does."""
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])

"""Private names of torch that the callbacks use: only this file of the folder uses any. And what is known without Lightning."""

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
"""Key of a checkpoint: `EMA`'s average by the names of `state_dict`, in fp32. Trainable parameters only."""
IGNORED = -100
"""A target that does not count, as in `torch.nn.functional.cross_entropy`."""


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts, depth first."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for each in nested:
            yield from tensors_in(each)
    elif isinstance(nested, dict):
        for each in nested.values():
            yield from tensors_in(each)


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device in place by a 0-d tensor, in one fused launch (like `clip_grads_with_norm_`)."""
    if all(tensor.dtype == factor.dtype for tensor in tensors):
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:  # a GPU would round a 0-d factor to the dtype of each
        tensor.mul_(factor.view((1,) * tensor.ndim))


def lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move each tensor towards another of its dtype by a share of their difference, in one fused launch."""
    torch._foreach_lerp_(tensors, ends, weight)


def process_count() -> int:
    """Processes of the default group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(value: T) -> list[T]:
    """`value` of each process, by rank; of the only one without a process group. A collective."""
    values = [value] * process_count()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, a view of its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of the gradient, placed like the parameter: partial sums are reduced."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return None if grad is None else local_part(grad)


def local_box(tensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole tensor: one slice per dimension, empty if the rank holds nothing.

    Sharding in contiguous chunks, once (FSDP2 or tensor parallelism) or twice (both), always gives one box.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def after_gradients(call: Callable[[], None]) -> None:
    """During a backward pass: call `call` when all gradients are computed, before calls that are queued later.

    DDP and FSDP2 queue theirs later in the backward pass. Theirs wait for the reduction.
    """
    Variable._execution_engine.queue_callback(call)


def is_profiling() -> bool:
    """Whether a torch.profiler is recording."""
    return torch.autograd._profiler_enabled()


def profiler_events(recording: profile) -> Any:
    """The kineto events of a stopped profiler. Ten times faster than `recording.events()`."""
    return recording.profiler.kineto_results.events()  # type: ignore[union-attr]


def unscales_by_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer (a fused one) itself unscales gradients under fp16 loss scaling."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def start_memory_history(entries: int) -> None:
    """Start recording the last `entries` allocations and frees of CUDA memory."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def stop_memory_history(file: Path | None) -> None:
    """Write the recording to `file`, if given, and stop recording."""
    if file is not None:
        torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)


def prepare_reduction(ddp: DistributedDataParallel) -> None:
    """Prepare DDP to reduce the gradients of the next backward pass, as its forward pass does."""
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])

"""Which part of a whole tensor a rank holds: full tensors into local shards and back, without communication where possible."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lit_llm.errors import UserError


def local_slice(tensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole tensor: one slice a dimension, empty where the rank holds nothing.

    Sharding in chunks of contiguous rows, once (FSDP2 or tensor parallel) or twice (both), always gives one box.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def holds_first_copy(tensor: DTensor) -> bool:
    """Whether this rank is the one to write its shard: of equal copies along replicated mesh dimensions, the first."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(c == 0 for c, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate))


@torch.no_grad()
def fill_(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into `tensor`; of a DTensor each rank copies its part, which needs no communication.

    Raises:
        UserError: the shapes differ.
    """
    if tensor.shape != whole.shape:
        raise UserError(f"a tensor of shape {tuple(whole.shape)} does not fit one of shape {tuple(tensor.shape)}")
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(whole[local_slice(tensor)])
    else:
        tensor.copy_(whole)


@torch.no_grad()
def draw_(parameter: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
    """Initialise a parameter in place as if it were whole: every rank draws all of it and keeps its part.

    So the random stream, and with it every weight, is the same on any number of ranks. Costs the memory of one whole tensor.
    """
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        fill_(parameter, draw(torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)))
    else:
        draw(parameter)

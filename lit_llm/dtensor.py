"""Distributed tensors: which part of a whole tensor a rank holds, and whole tensors to parts and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lit_llm._torch import local_box
from lit_llm.errors import UserError


def local_slice(tensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole tensor: one slice per dimension, empty if the rank holds nothing.

    Sharding in contiguous chunks, once (FSDP2 or tensor parallelism) or twice (both), always gives one box.
    """
    shape, offset = local_box(tensor)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def holds_first_copy(tensor: DTensor) -> bool:
    """Whether this rank writes its shard: of equal copies along replicated mesh dimensions, only the first is written."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(c == 0 for c, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate))


@torch.no_grad()
def fill_(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into `tensor`. Each rank copies its part of a DTensor, without communication.

    Raises:
        UserError: if the shapes differ.
    """
    if tensor.shape != whole.shape:
        raise UserError(f"A tensor of shape {tuple(whole.shape)} does not fit one of shape {tuple(tensor.shape)}.")
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(whole[local_slice(tensor)])
    else:
        tensor.copy_(whole)


@torch.no_grad()
def draw_(parameter: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
    """Initialise a parameter in place: every rank draws the whole tensor and keeps its part.

    So the random stream, and every weight, is the same on any number of ranks. Costs the memory of one whole tensor.
    """
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        fill_(parameter, draw(torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)))
    else:
        draw(parameter)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, a view of its memory. A plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(params: list[Tensor]) -> list[Tensor]:
    """This rank's parts of the gradients, with their parameters' placements. Partial sums are reduced."""
    grads = []
    for p in params:
        assert p.grad is not None
        grad = p.grad
        if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
            grad = grad.redistribute(placements=p.placements)
        grads.append(local_part(grad))
    return grads


def gather_like(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor whose part each rank holds, with the placements of the parameter `like`. All ranks call it."""
    if not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()).full_tensor()

"""Distributed tensors: which part of a whole tensor a rank holds, and how parts are filled, drawn and differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lit_llm.callbacks._torch import local_box as local_box
from lit_llm.callbacks._torch import local_gradient
from lit_llm.callbacks._torch import local_part as local_part
from lit_llm.core.errors import UserError


def holds_first_copy(tensor: DTensor) -> bool:
    """Whether this rank writes its shard: of equal copies along replicated mesh dimensions, only the first is written."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(c == 0 for c, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate))


def differentiable_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, for plain operators. The gradient of a replicated tensor is the sum over its ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=[Partial() if isinstance(p, Replicate) else p for p in tensor.placements])


def whole_experts(tensor: DTensor) -> list[Placement]:
    """Placements with which each rank holds, as a whole, every expert of which it holds a part in `tensor` (E, …)."""
    return [Replicate() if isinstance(p, Shard) and p.dim > 0 else p for p in tensor.placements]


def zeros_by_row(tensor: Tensor) -> Tensor:
    """Zeros (E, r, 1) for matrices of experts (E, r, c). A rank has all rows of every expert of which it holds a part."""
    local, shape = local_part(tensor), (*tensor.shape[:2], 1)
    zeros = torch.zeros(local.size(0), *shape[1:], dtype=tensor.dtype, device=local.device)
    if not isinstance(tensor, DTensor):
        return zeros
    return DTensor.from_local(
        zeros, tensor.device_mesh, whole_experts(tensor), shape=torch.Size(shape), stride=(shape[1], 1, 1)
    )


@torch.no_grad()
def fill_(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into `tensor`. Each rank copies its part of a DTensor, without communication.

    Raises:
        UserError: if the shapes differ.
    """
    if tensor.shape != whole.shape:
        raise UserError(f"A tensor of shape {tuple(whole.shape)} does not fit one of shape {tuple(tensor.shape)}.")
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(whole[local_box(tensor)])
    else:
        tensor.copy_(whole)


@torch.no_grad()
def draw_(parameter: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
    """Initialise a parameter in place: every rank draws the whole tensor and keeps its part.

    So the random stream, and every weight, is the same on any number of ranks. Costs the memory of one whole tensor. A
    parameter on the meta device belongs to another stage of a pipeline: its values are drawn on the default device and dropped.

    Args:
        draw: fills a plain tensor with random values, and returns it.
    """
    if parameter.is_meta:
        draw(torch.empty(parameter.shape, dtype=parameter.dtype))
    elif isinstance(parameter, DTensor):
        local = parameter.to_local()
        fill_(parameter, draw(torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)))
    else:
        draw(parameter)


def local_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each parameter's gradient, by `local_gradient`. All parameters must have gradients."""
    grads = []
    for p in params:
        grad = local_gradient(p)
        assert grad is not None
        grads.append(grad)
    return grads

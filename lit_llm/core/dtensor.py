"""Functions for DTensors: find, fill, initialise and differentiate this rank's shards."""

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
    """Whether this rank is the first of those with the same shard of `tensor`. Only the first saves it in checkpoints."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(c == 0 for c, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate))


def differentiable_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, as a plain tensor with autograd. A replicated tensor's gradient is summed over ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=[Partial() if isinstance(p, Replicate) else p for p in tensor.placements])


def whole_experts(tensor: DTensor) -> list[Placement]:
    """Placements for `tensor` (E, …) in which each expert is whole: dimension 0 stays sharded, other dimensions do not."""
    return [Replicate() if isinstance(p, Shard) and p.dim > 0 else p for p in tensor.placements]


def zeros_by_row(tensor: Tensor) -> Tensor:
    """Make zeros (E, r, 1), one per row of the matrices `tensor` (E, r, c). If sharded, then by experts, with all rows."""
    local, shape = local_part(tensor), (*tensor.shape[:2], 1)
    zeros = torch.zeros(local.size(0), *shape[1:], dtype=tensor.dtype, device=local.device)
    if not isinstance(tensor, DTensor):
        return zeros
    return DTensor.from_local(
        zeros, tensor.device_mesh, whole_experts(tensor), shape=torch.Size(shape), stride=(shape[1], 1, 1)
    )


@torch.no_grad()
def fill_(tensor: Tensor, whole: Tensor) -> None:
    """Copy the tensor `whole` into `tensor`. If this is a DTensor, each rank copies its shard, without communication.

    Raises:
        UserError: the shapes differ.
    """
    if tensor.shape != whole.shape:
        raise UserError(f"A tensor of shape {tuple(whole.shape)} does not fit one of shape {tuple(tensor.shape)}.")
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(whole[local_box(tensor)])
    else:
        tensor.copy_(whole)


@torch.no_grad()
def draw_(parameter: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
    """Initialise a parameter in place: every rank draws the whole tensor and copies its shard.

    So the random stream, and every weight, is the same on any number of ranks. This takes the memory of one whole tensor. A
    parameter on the meta device belongs to another pipeline stage: its values are drawn on the default device and dropped.

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
    """This rank's shard of each parameter's gradient, sharded like the parameter. All parameters must have gradients."""
    grads = []
    for p in params:
        grad = local_gradient(p)
        assert grad is not None
        grads.append(grad)
    return grads

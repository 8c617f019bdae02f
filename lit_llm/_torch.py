"""Private names of torch that lit_llm needs. No other module of lit_llm names one; lit_llm.callbacks has its own module."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

# In-place arithmetic on lists of tensors, one fused launch a list: what torch's own optimizers are made of.
foreach_add_ = torch._foreach_add_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_sign_ = torch._foreach_sign_

# The kernels of attention on a CPU, for which FlopCounterMode has no formula.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

HYBRID_SHARD_GRAD_OP = ShardingStrategy._HYBRID_SHARD_ZERO2  # of FSDP1: within a node, weights not freed after forward


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset in the whole tensor) of this rank's shard."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def flatten_mesh(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """A mesh's ranks along one dimension; collectives over several dimensions then run as one."""
    return mesh._flatten(name)


def take_unscaled_gradients(optimizer: Optimizer) -> None:
    """Make the fp16 loss scaler unscale the gradients of a fused optimizer before its step, as it does for others."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

"""Kernels of a GPU whose memory differs from that of the CPU's, for a trace on the CPU.

A CPU build of torch cannot run autograd on tensors that say they are on a GPU. So the trace runs the CPU's kernels, and these
functions are replaced, after torch 2.13's source:

- rms_norm, layer_norm: one kernel that keeps its input and the statistics of each row (`_fused_rms_norm`, `native_layer_norm`).
- rms_norm, layer_norm, pow, square: fp32 under autocast (AT_FORALL_FP32 in `ATen/autocast_mode.h`).
- attention without dropout: the operator of FlashAttention. Its output is laid out as the queries are, and it keeps logsumexp.
- float8 keeps what bf16 does: torchao saves inputs and weights for the backward pass in their own precision
  (`matmul_with_hp_or_float8_args` in `torchao/float8/float8_linear.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from lit_llm.core._torch import FLASH_ATTENTION


class CudaKernels(TorchFunctionMode):
    """Replaces functions of torch by ones that allocate and keep what the GPU's do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACED.get(function)
        if replacement is None:
            return function(*args, **(kwargs or {}))
        return replacement(function, *args, **(kwargs or {}))

    @staticmethod
    def around(module: nn.Module) -> None:
        """Run the module under this mode also when it is recomputed: the backward pass leaves all modes."""
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with CudaKernels():
                return forward(*args, **kwargs)

        module.forward = run


def _fp32(x: Tensor) -> Tensor:
    return x.float() if torch.is_autocast_enabled("cpu") and x.is_floating_point() else x


def _pow(function: Any, x: Tensor, *args: Any) -> Tensor:
    return function(_fp32(x), *args)


def _rms_norm(function: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
    return _Norm.apply(_fp32(x), weight, None, len(shape), 1)


def _layer_norm(
    function: Any,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _Norm.apply(_fp32(x), weight, bias, len(shape), 2)


def _attention(function: Any, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    return FLASH_ATTENTION(q, k, v)[0]


_REPLACED: dict[Any, Any] = {
    F.rms_norm: _rms_norm,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
    torch.square: _pow,
    Tensor.square: _pow,
    torch.pow: _pow,
    Tensor.pow: _pow,
}


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, ndim: int, statistics: int) -> Tensor:
        y = torch.empty_like(x)
        rows = torch.empty(statistics, *x.shape[:-ndim], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, bias, rows)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors[:3]), None, None

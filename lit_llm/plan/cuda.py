"""Kernels of a GPU whose memory differs from that of the CPU's, for a trace on the CPU.

A CPU build of torch cannot run autograd on tensors that say they are on a GPU. So the trace runs the CPU's kernels, and these
functions are replaced, after torch 2.13's source:

- rms_norm, layer_norm: one kernel that keeps its input and the statistics of each row (`_fused_rms_norm`, `native_layer_norm`).
- rms_norm, layer_norm, pow, square: fp32 under autocast (AT_FORALL_FP32 in `ATen/autocast_mode.h`).
- attention without dropout: keeps queries, keys, values, output and logsumexp. The output is laid out by positions, then heads
  (`_scaled_dot_product_flash_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from lit_llm.plan.recorder import ATTENTION, Recorder


class CudaKernels(TorchFunctionMode):
    """Replaces functions of torch by ones that allocate and keep what the GPU's do."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACED.get(function)
        if replacement is None:
            return function(*args, **(kwargs or {}))
        return replacement(self.recorder, function, *args, **(kwargs or {}))

    def around(self, module: nn.Module) -> None:
        """Run the module under this mode also when it is recomputed: the backward pass leaves all modes."""
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with CudaKernels(self.recorder):
                return forward(*args, **kwargs)

        module.forward = run


def _fp32(x: Tensor) -> Tensor:
    return x.float() if torch.is_autocast_enabled("cpu") and x.is_floating_point() else x


def _pow(recorder: Recorder, function: Any, x: Tensor, *args: Any) -> Tensor:
    return function(_fp32(x), *args)


def _rms_norm(
    recorder: Recorder, function: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None
) -> Tensor:
    return _Norm.apply(_fp32(x), weight, None, len(shape), 1)


def _layer_norm(
    recorder: Recorder,
    function: Any,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _Norm.apply(_fp32(x), weight, bias, len(shape), 2)


def _attention(recorder: Recorder, function: Any, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    return _Attention.apply(q, k, v, recorder)


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


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, recorder: Recorder) -> Tensor:
        ctx.recorder = recorder
        recorder.add(ATTENTION, sdpa_flop_count(q.shape, _heads_of(q, k), _heads_of(q, v)))
        batch, heads, length, _ = q.shape
        y = torch.empty(batch, length, heads, v.size(-1), dtype=q.dtype, device=q.device).transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, torch.empty(batch, heads, length, dtype=torch.float32, device=q.device))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        flops = sdpa_backward_flop_count(gradient.shape, q.shape, _heads_of(q, k), _heads_of(q, v))
        ctx.recorder.add(ATTENTION, flops)
        return *(torch.empty_like(x) for x in (q, k, v)), None


def _heads_of(q: Tensor, x: Tensor) -> tuple[int, ...]:
    """The shape of `x` with a head for each query head."""
    return (x.size(0), q.size(1), *x.shape[2:])

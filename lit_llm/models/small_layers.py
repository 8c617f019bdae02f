"""Norms of a block, and the base class of modules of which `model.to(torch.bfloat16)` converts only weight and bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.models.config import GPTConfig


class KeepsPrecision(nn.Module):
    """Base class of modules in which `model.to(torch.bfloat16)` converts only weight and bias: the rest stays fp32 at least."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        parameters = [p for name, p in self.named_parameters(recurse=False) if name in ("weight", "bias")]
        narrowed = [*parameters, *(p.grad for p in parameters)]

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_kept = moved.dtype.itemsize < torch.float32.itemsize and not any(tensor is each for each in narrowed)
            return tensor.to(moved.device, torch.float32) if is_kept else moved

        return super()._apply(keep_precision, recurse)


class UnitOffsetRMSNorm(nn.RMSNorm):
    """RMSNorm with the gain 1 + weight (Gemma), so that weight decay draws the gain to 1. The initial weight is zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def make_rms_norm(config: GPTConfig, width: int) -> nn.RMSNorm:
    return (UnitOffsetRMSNorm if config.norm_unit_offset else nn.RMSNorm)(width, eps=config.norm_eps)


def make_norm(config: GPTConfig) -> nn.RMSNorm | nn.LayerNorm:
    """Make a norm of the residual stream, of the kind that `config.norm` names."""
    if config.norm == "rmsnorm":
        return make_rms_norm(config, config.n_embd)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.has_bias("norm"))

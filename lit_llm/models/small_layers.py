"""Norms of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.models.config import GPTConfig


class UnitOffsetRMSNorm(nn.RMSNorm):
    """RMSNorm with the gain 1 + weight (Gemma). Weight decay then draws the gain to 1. The weight starts at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def make_rms_norm(config: GPTConfig, width: int) -> nn.RMSNorm:
    return (UnitOffsetRMSNorm if config.norm_unit_offset else nn.RMSNorm)(width, eps=config.norm_eps)


def make_norm(config: GPTConfig) -> nn.RMSNorm | nn.LayerNorm:
    """A norm of the residual stream."""
    if config.norm == "rmsnorm":
        return make_rms_norm(config, config.n_embd)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.has_bias("norm"))

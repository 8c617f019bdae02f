"""The small layers of a block: norms, and a causal convolution of a few positions by channel.

Shape letters: B sequences, T positions, c channels, n positions of the convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.core.dtensor import local_part
from lit_llm.models.cache import LayerCache
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


class ShortConvolution(nn.Module):
    """Adds to each channel a learned sum of its own values at this position and the n - 1 before it.

        y_t = x_t + Σ_i w_i x_(t - i),   i = 0 … n - 1

    It starts as the identity. Positions of other documents, and those before the first, count as zero (Primer, So et al. 2021,
    arXiv 2109.08668, without the sum; Canon layers, Allen-Zhu 2025, with it).
    """

    def __init__(self, positions: int, channels: int) -> None:
        super().__init__()
        self.positions, self.channels = positions, channels
        # One dimension, channel by channel: it is a vector for the optimizer, and tensor parallelism splits it by channels.
        self.weight = nn.Parameter(torch.empty(channels * positions))

    def forward(self, x: Tensor, documents: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """(B, T, c) → (B, T, c).

        Args:
            documents: (B, S) document numbers of all positions so far. None: one document.
            cache: has the positions before these; extended in place.
        """
        past, length = self.positions - 1, x.size(1)
        all_x = F.pad(x, (0, 0, past, 0)) if cache is None else cache.with_past(self, x, past)  # (B, n - 1 + T, c)
        weight = local_part(self.weight).view(-1, self.positions)  # (c, n), the newest position first
        if documents is None:
            # An image of height n - 1 + T and width 1, channels last, is a view. On a CPU its convolution is 2 to 4 times as
            # fast as that of a sequence, whose channels come before the positions (benchmarks/short_convolution.py).
            image = all_x.unsqueeze(2).permute(0, 3, 1, 2)  # (B, c, n - 1 + T, 1)
            kernel = weight.flip(1)[:, None, :, None].to(x.dtype)  # (c, 1, n, 1)
            return x + F.conv2d(image, kernel, groups=x.size(2)).permute(0, 2, 3, 1).squeeze(2)
        # In the type of x, under autocast too, where the convolution above is computed in the narrow type.
        weight = weight.t().to(x.dtype).contiguous()  # (n, c)
        y = x * (1 + weight[0])
        for i in range(1, self.positions):
            earlier = all_x[:, past - i : past - i + length]
            y = torch.addcmul(y, earlier * _in_same_document(documents, i)[:, -length:], weight[i])
        return y


def _in_same_document(documents: Tensor, lag: int) -> Tensor:
    """(B, S, 1) bool: whether the position `lag` before is in the same document."""
    same = documents[:, lag:] == documents[:, :-lag]
    return F.pad(same, (min(lag, documents.size(1)), 0))[..., None]

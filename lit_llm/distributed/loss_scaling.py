"""Precision 16-mixed on CPUs and under MeshStrategy, which Lightning does not support."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.precision import MixedPrecision


def loss_scaling(device_type: str) -> MixedPrecision:
    """fp16 autocast with dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740).

    torch's GradScaler supports distributed gradients: an overflow on one rank skips the step on all ranks of the tensor.
    """
    return MixedPrecision("16-mixed", device_type, scaler=torch.amp.GradScaler(device_type))

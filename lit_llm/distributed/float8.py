"""float8 training of the blocks' linear layers, by torchao."""

from __future__ import annotations

import torch

from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT


def float8_problem(device: torch.device) -> str | None:
    """Why a device does not support float8 products; None if it does. Ada has compute capability 8.9, Hopper 9.0."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    needed = "compute.float8 needs an NVIDIA GPU of compute capability 8.9 or more"
    return f"{needed}, but this device is {name} (--compute.float8 false)"


def convert_to_float8(model: GPT | CustomModel) -> None:
    """Replace the linear layers of the blocks by torchao's float8 ones. Not the head, because the loss needs its range."""
    from torchao.float8 import convert_to_float8_training  # an optional dependency

    # The kernels need both sizes to be multiples of 16, and torchao does not skip other layers.
    convert_to_float8_training(
        model.blocks,
        module_filter_fn=lambda module, name: module.in_features % 16 == 0 and module.out_features % 16 == 0,
    )

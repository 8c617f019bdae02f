"""Compile blocks with torch.compile, and convert the linear layers of blocks to float8 with torchao."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT


def no_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot work for a device on this machine; None if torch.compile can work."""
    if device.type == "cpu":
        candidates = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++", "cl"]
        if not any(shutil.which(name) for name in candidates):
            return f"no C++ compiler was found ({', '.join(candidates)})"
    elif importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def compile_blocks(model: GPT | CustomModel, device: torch.device) -> None:
    """Compile each block's `forward`, in place. Blocks share one compilation. FSDP's hooks run outside the compiled code.

    Under tensor parallelism, the collectives within a block are compiled too. Only warns if torch.compile cannot work.
    """
    reason = no_compiler(device)
    if reason:
        rank_zero_warn(f"compute.compile is off: {reason} (--compute.compile false).")
        return
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


def float8_problem(device: torch.device) -> str | None:
    """Why a device does not support float8 matrix products; None if supported. Ada has compute capability 8.9, Hopper 9.0."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    needed = "compute.float8 needs an NVIDIA GPU of compute capability 8.9 or more"
    return f"{needed}, but this device is {name} (--compute.float8 false)"


def convert_to_float8(model: GPT | CustomModel) -> None:
    """Replace the linear layers of a model's blocks by torchao's float8 layers, in place, where both sizes are multiples of 16.

    The head is not replaced: logits need more range."""
    from torchao.float8 import convert_to_float8_training  # an optional dependency

    # The kernels need both sizes to be multiples of 16. torchao itself does not skip layers of other sizes.
    convert_to_float8_training(
        model.blocks,
        module_filter_fn=lambda module, name: module.in_features % 16 == 0 and module.out_features % 16 == 0,
    )

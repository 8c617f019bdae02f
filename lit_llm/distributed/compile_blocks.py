"""torch.compile of the blocks."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT


def no_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot work for a device on this machine; None if it can."""
    if device.type == "cpu":
        candidates = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++", "cl"]
        if not any(shutil.which(name) for name in candidates):
            return f"no C++ compiler was found ({', '.join(candidates)})"
    elif importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def compile_blocks(model: GPT | CustomModel, device: torch.device) -> None:
    """Compile each block's forward: one compilation serves all blocks, and FSDP's hooks run outside it.

    Under tensor parallelism the collectives within a block are compiled with it.
    """
    reason = no_compiler(device)
    if reason:
        rank_zero_warn(f"compute.compile is off: {reason} (--compute.compile false).")
        return
    for block in model.blocks:
        block.forward = torch.compile(block.forward)

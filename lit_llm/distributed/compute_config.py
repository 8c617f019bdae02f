"""How the model is computed: what is kept for the backward pass, and what a compiler or narrower numbers do about it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from typing import Literal

import torch

MODES = ("none", "full", "attention", "cheap")


@dataclass
class ComputeConfig:
    """How the model is computed. Nothing here changes what is computed, up to rounding."""

    activation_checkpointing: Literal["none", "full", "attention", "cheap"] | int = "none"
    """What the backward pass computes anew instead of keeping it. full: every block; k: every k-th block; attention: queries,
    keys, values, rotation and attention of every block; cheap: all but the results of matrix products and attention."""
    compile: bool = False
    """torch.compile each block. Off with a warning where there is no compiler, and under tensor parallelism."""
    float8: bool = False
    """The blocks' linear layers in float8 (torchao), on GPUs that have it: NVIDIA Ada, Hopper and later."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch's float32_matmul_precision: high lets GPUs with tensor cores multiply fp32 matrices in tf32."""

    def problems(self) -> list[str]:
        """Every reason why this cannot be done, one sentence each, as far as that is known before the device is."""
        found = []
        mode = self.activation_checkpointing
        if isinstance(mode, int) and mode < 1:
            found.append(
                f"compute.activation_checkpointing is {mode}, every k-th block needs a k of at least 1 "
                "(--compute.activation_checkpointing, none for none)"
            )
        if self.float8 and importlib.util.find_spec("torchao") is None:
            found.append("compute.float8 needs torchao: pip install torchao (or --compute.float8 false)")
        return found


def float8_problem(device: torch.device) -> str | None:
    """Why a device cannot multiply in float8; None if it can. Ada is compute capability 8.9, Hopper 9.0."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"compute.float8 needs an NVIDIA GPU of compute capability 8.9 or more, this is {name} (--compute.float8 false)"


def no_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot work for a device here; None if it can."""
    if device.type == "cpu":
        candidates = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++", "cl"]
        if not any(shutil.which(name) for name in candidates):
            return f"there is no C++ compiler ({', '.join(candidates)})"
    elif importlib.util.find_spec("triton") is None:
        return "there is no Triton"
    return None

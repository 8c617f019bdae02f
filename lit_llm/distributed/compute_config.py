"""Compute settings: activation checkpointing, compilation, float8 and the precision of matrix products."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Annotated, Literal

from lit_llm.core.number_domain import range_problems, whole
from lit_llm.models.attention_kernel_choice import AttentionKernel


@dataclass
class ComputeConfig:
    """Compute settings. They change results only by rounding."""

    activation_checkpointing: Annotated[Literal["none", "full", "attention", "cheap"] | int, whole(1, 10_000)] = "none"
    """Activations that the backward pass recomputes instead of storing. full: every block from its input; a number k: as full,
    but only blocks 1, k + 1, 2k + 1, …, while the others keep everything, so a larger k saves less; attention: queries, keys,
    values, rotation and attention of every block; cheap: all but the results of matrix products and attention."""
    compile: bool = False
    """torch.compile each block. Turned off with a warning if no compiler is found."""
    attention: AttentionKernel = "auto"
    """Kernel of attention. auto: the fastest known for the device. sdpa: torch's own kernel; flash3, flash4: FlashAttention,
    for layers with plain causal attention. flex: FlexAttention (CUDA). blocks: in blocks, with plain torch beside the CPU."""
    float8: bool = False
    """The blocks' linear layers in float8 (torchao), on GPUs that support it: NVIDIA Ada, Hopper and later."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch's float32_matmul_precision: high lets GPUs with tensor cores multiply fp32 matrices in tf32."""

    def problems(self) -> list[str]:
        """Return every reason why these settings cannot work, one sentence each, as far as it is known without the device."""
        problems = range_problems(ComputeConfig, "compute", vars(self))
        if self.float8 and importlib.util.find_spec("torchao") is None:
            problems.append("compute.float8 needs torchao: pip install torchao (or --compute.float8 false)")
        return problems

"""Compute settings: activation checkpointing, compilation, float8 and the precision of matrix products."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Annotated, Literal

from lit_llm.core.number_domain import range_problems, whole
from lit_llm.models.attention_kernel_choice import AttentionKernel


@dataclass
class ComputeConfig:
    """Record of the settings of how blocks compute. These settings change results only by rounding."""

    activation_checkpointing: Annotated[Literal["none", "full", "attention", "cheap"] | int, whole(1, 10_000)] = "none"
    """The activations that the backward pass recomputes. full: every block from its input. A number k: whole blocks, but only
    1, k + 1, 2k + 1, …, so a larger k saves less memory. attention: queries, keys, values, rotation and attention of every
    block. cheap: all but the results of matrix products and attention. none: no activation."""
    compile: bool = False
    """torch.compile each block. Turned off with a warning if no compiler is found."""
    attention: AttentionKernel = "auto"
    """Kernel of attention. auto: the fastest known for the device. sdpa: torch's own kernel; flash3, flash4: FlashAttention,
    for layers with plain causal attention. flex: FlexAttention (CUDA). blocks: in blocks, by torch's flash kernel on CPUs."""
    float8: bool = False
    """Whether the blocks' linear layers compute in float8 (torchao), on GPUs with float8: NVIDIA Ada, Hopper and later."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch's float32_matmul_precision: high lets GPUs with tensor cores multiply fp32 matrices in tf32."""

    def problems(self) -> list[str]:
        """One sentence for each reason why these settings cannot work. Reasons that depend on the device are not checked."""
        problems = range_problems(ComputeConfig, "compute", vars(self))
        if self.float8 and importlib.util.find_spec("torchao") is None:
            problems.append("compute.float8 needs torchao: pip install torchao (or --compute.float8 false)")
        return problems

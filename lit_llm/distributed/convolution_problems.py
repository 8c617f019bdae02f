"""Layouts that share the positions of a sequence among ranks do not know the positions before each, which convolutions need."""

from __future__ import annotations

from lit_llm.models.config import GPTConfig

SHARED = {
    "context": ("each sequence", ("qkv_convolution", "input_convolution")),
    "tensor_parallel": ("the positions between matrices", ("input_convolution",)),
}
"""What ranks share, and the settings that it excludes."""


def convolution_problems(config: GPTConfig, ranks: dict[str, int]) -> list[str]:
    """Every setting of a model that excludes this layout, one sentence each.

    Args:
        ranks: their number, by the names in `SHARED`.
    """
    return [
        f"{layout}={ranks[layout]} shares {what} among ranks, but model.{name}={getattr(config, name)} needs the positions "
        f"before each: use --model.{name} null, or --trainer.strategy.{layout} 1"
        for layout, (what, names) in SHARED.items()
        if ranks.get(layout, 1) > 1
        for name in names
        if getattr(config, name) is not None
    ]

"""Upcycling: makes a mixture of experts from a dense model's weights (Komatsuzaki et al. 2023, arXiv 2212.05055)."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from lit_llm.core.errors import UserError
from lit_llm.models.config import GPTConfig
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.router import initial_buffers

_OF_MLP = re.compile(r"blocks\.\d+\.mlp\.(up|gate|project)\.(weight|bias)")


def upcycled(config: GPTConfig, weights: dict[str, Tensor], experts: int) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Return (settings, state_dict) of a mixture of experts with the same outputs as the dense model. In each block, all
    experts are copies of the block's MLP, and two experts compute each token.

    The routers' weights are random (seed 0), so that experts get different tokens, and training makes them different.

    Args:
        config, weights: the settings and the state_dict of the dense model.
        experts: number of experts in each block.

    Raises:
        UserError: the model has experts already, or a model with `experts` experts is not valid.
    """
    if config.moe is not None:
        raise UserError(f"the model has {config.moe.experts} experts already: leave out --upcycle")
    sparse_config = replace(config, moe=MoEConfig(experts=experts))
    if mistakes := sparse_config.mistakes():
        raise UserError(f"{mistakes[0].what} (--upcycle)")
    tensors = {
        name: tensor.expand(experts, *tensor.shape).contiguous() if _OF_MLP.fullmatch(name) else tensor
        for name, tensor in weights.items()
    }
    generator, dtype = torch.Generator().manual_seed(0), weights["embedding.weight"].dtype
    for i in range(config.n_blocks):
        drawn = torch.empty(experts, config.n_embd).normal_(std=sparse_config.hidden_std, generator=generator)
        router = {"weight": drawn.to(dtype), **initial_buffers(experts)}
        tensors |= {f"blocks.{i}.mlp.router.{name}": tensor for name, tensor in router.items()}
    return sparse_config, tensors

"""The coordinate check: do a few optimizer updates change activations by the same amount at every width?

If so, one learning rate is right for every width (Yang et al. 2022, arXiv 2203.03466, appendix D.1; docs/transfer.md). If not,
the change of the activations grows or falls as a power of the width. The check fits the exponent of that power.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import LossSums
from lit_llm.optim import optimizer_of

WIDTHS, BASE_WIDTH, HEAD_DIM = (64, 128, 256), 128, 32
LAYERS, VOCABULARY, ROWS, LENGTH = 2, 64, 4, 32
STEPS, SEEDS = 4, 2
LARGEST_POWER = 0.3
"""Largest accepted exponent p. Measured p for AdamW, Lion, and Muon with both `adjust_lr`: with base_width, at most 0.21;
without base_width, at least 0.46 in queries, hidden units or logits."""


def width_powers(config: GPTConfig, make: Callable[[list[dict[str, Any]]], Optimizer]) -> dict[str, float]:
    """Name of an activation → p: the change of this activation by `STEPS` updates grows as width^p.

    The activations are queries, hidden units, residual stream and logits, of models like `config` with two blocks and widths 64
    to 256. The models learn one batch of random ids in fp32 on the CPU. If `config` has a `base_width`, theirs is 128.

    Args:
        make: makes an optimizer from groups of parameters.
    """
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    points: dict[str, list[float]] = {}
    for width in WIDTHS:
        logs: dict[str, float] = {}
        for seed in range(SEEDS):
            for name, change in _changes(_small(config, width), make, ids, seed).items():
                logs[name] = logs.get(name, 0.0) + math.log(max(change, 1e-30)) / SEEDS
        for name, value in logs.items():
            points.setdefault(name, []).append(value)
    x = [math.log(width) for width in WIDTHS]
    return {name: statistics.linear_regression(x, values).slope for name, values in points.items()}


def _small(config: GPTConfig, width: int) -> GPTConfig:
    changes: dict[str, Any] = {
        **{"n_layer": LAYERS, "n_embd": width, "n_head": width // HEAD_DIM, "n_kv_head": None, "head_dim": None},
        **{"mlp_width": None, "block_size": LENGTH, "vocab_size": VOCABULARY, "pad_vocab_to": 1, "eos_id": None},
        **{"mask_documents": False, "window": None, "layers": None, "rope_scaling": None, "partial_rotary_factor": 1.0},
        **{"predict_ahead": 0, "dropout": 0.0, "base_depth": None},
        "base_width": None if config.base_width is None else BASE_WIDTH,
    }
    return replace(config, **changes)


def _changes(config: GPTConfig, make: Callable[[list[dict[str, Any]]], Optimizer], ids: Tensor, seed: int) -> dict[str, float]:
    """Name of an activation → root mean square of its change by `STEPS` updates, in the last block and in the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(config)
    optimizer = optimizer_of(model, make)
    seen: dict[str, Tensor] = {}

    def store(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen[name] = output.detach()

    last: Any = model.blocks[-1]
    for name, module in {"queries": last.attention.query, "hidden units": last.mlp.up, "residual stream": last}.items():
        module.register_forward_hook(partial(store, name))

    def activations() -> dict[str, Tensor]:
        with torch.no_grad():
            logits = model(ids[:, :-1])
        return {**seen, "logits": logits}

    before = activations()
    for _ in range(STEPS):
        sums = model(ids[:, :-1], ids[:, 1:])
        assert isinstance(sums, LossSums)
        optimizer.zero_grad()
        (sums.loss / sums.count).backward()
        optimizer.step()
    after = activations()
    return {name: (after[name] - before[name]).double().square().mean().sqrt().item() for name in before}

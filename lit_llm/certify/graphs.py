"""How often a block is compiled over batches of different sizes, validation and training, and whether its graph breaks."""

from __future__ import annotations

from typing import Any

import torch

from lit_llm.certify.check import Outcome, failed, judged
from lit_llm.models.gpt import GPT, GPTConfig

PROMISE = "blocks are compiled at most 3 times"
NAME = "graphs/uneven batches"
BATCHES = (4, 4, 2, 3, 4)
"""Sequences of a micro-batch: the last of an epoch is smaller, and a ramp changes them."""


def check(name: str, device: str) -> Outcome:
    """Graphs of all blocks; a graph break fails."""
    torch.manual_seed(1)
    model, graphs = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64)).to(device), []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=count, fullgraph=True)  # a break raises
    try:
        for size in BATCHES:
            model(torch.zeros(size, 16, dtype=torch.long, device=device)).sum().backward()
    except RuntimeError as error:
        return failed(name, PROMISE, f"a block does not compile as one graph: {str(error).splitlines()[0]}")
    finally:
        torch.compiler.reset()
    return judged(name, PROMISE, len(graphs), 3)

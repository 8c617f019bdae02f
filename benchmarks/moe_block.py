"""Experts against a dense MLP of equal FLOPs for a token: processor time of forward and backward, as medians of paired ratios.

    python benchmarks/moe_block.py

A pair is one pass of each, in the order ABBA, on one thread (`thread_time` counts no other). Two experts, each half as wide as
the MLP, compute a token. Weights have gradients, as in training.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.models.experts import Experts
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.gpt import GPT, GPTConfig

TOKENS, PAIRS = 4096, 9
WIDTHS, EXPERTS = (256, 512, 1024), (4, 8, 16)


def mlp_of(width: int, experts: int | None) -> nn.Module:
    moe = None if experts is None else MoEConfig(experts, top_k=2, expert_width=2 * width)
    model = GPT(GPTConfig(n_layer=1, n_head=4, n_embd=width, block_size=TOKENS, vocab_size=64, mlp="relu2", moe=moe))
    return model.blocks[0].mlp


def seconds(mlp: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> float:
    counted = torch.ones(x.shape[:2], dtype=torch.bool)
    begin = time.thread_time()
    y = mlp(x, None, counted)[0] if isinstance(mlp, Experts) else mlp(x, None)
    torch.autograd.grad(y, [x, *(p for p in mlp.parameters() if p.requires_grad)], gradient)
    return time.thread_time() - begin


def main() -> None:
    torch.set_num_threads(1)
    print(f"| width | tokens | {' | '.join(f'{n} experts' for n in EXPERTS)} |\n|---|---|{'---|' * len(EXPERTS)}")
    for width in WIDTHS:
        x, gradient = torch.randn(1, TOKENS, width, requires_grad=True), torch.randn(1, TOKENS, width)
        dense, cells = mlp_of(width, None), []
        for experts in EXPERTS:
            sparse, ratios = mlp_of(width, experts), []
            for i in range(PAIRS + 1):
                both = [sparse, dense][:: 1 if i % 2 else -1]
                times = {id(mlp): seconds(mlp, x, gradient) for mlp in both}
                ratios.append(times[id(sparse)] / times[id(dense)])
            cells.append(f"{median(ratios[1:]):.2f}")  # the first pair warms up
        print(f"| {width} | {TOKENS:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

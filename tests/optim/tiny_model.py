"""A model with every kind of parameter, and gradients for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEPS = 6


class Tiny(nn.Module):
    """Every role once: embeddings, matrices of all proportions, gains, biases, a 3-D weight, a head, a frozen layer."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Embedding(5, 8)
        self.square = nn.Linear(8, 8, bias=False)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 3, bias=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def gradients(shapes: list[torch.Size], *, seed: int = 0) -> list[list[Tensor]]:
    """(STEPS, len(shapes)) float64 gradients of very different sizes, some of them negative means, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (step % 3 - 2) + 0.01 for shape in shapes]
        for step in range(STEPS)
    ]

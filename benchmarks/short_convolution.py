"""Processor time of forward and backward of `ShortConvolution`, and of two other ways to compute the same function.

    python benchmarks/short_convolution.py

The other ways are `F.conv1d`, which needs channels before positions, and a sum of shifted sequences.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_llm.models.short_convolution import ShortConvolution

POSITIONS, ROUNDS, REPEATS = 4, 9, 10
SIZES = {"4 × 128": (12, 64, 128), "quickstart": (8, 256, 256), "6 × 384": (16, 256, 384)}


def conv1d(x: Tensor, weight: Tensor) -> Tensor:
    """Return x plus its causal depthwise convolution, by `F.conv1d`: x (B, T, c), weight (c, n) → (B, T, c)."""
    padded = F.pad(x.transpose(1, 2), (POSITIONS - 1, 0))
    return x + F.conv1d(padded, weight.flip(1)[:, None], groups=x.size(2)).transpose(1, 2)


def shifts(x: Tensor, weight: Tensor) -> Tensor:
    """Return x plus its causal depthwise convolution, as a sum of shifts: x (B, T, c), weight (c, n) → (B, T, c)."""
    padded, past, length = F.pad(x, (0, 0, POSITIONS - 1, 0)), POSITIONS - 1, x.size(1)
    y = x * (1 + weight[:, 0])
    for i in range(1, POSITIONS):
        y = torch.addcmul(y, padded[:, past - i : past - i + length], weight[:, i])
    return y


def seconds(function: Callable[[], Tensor], gradient: Tensor, inputs: list[Tensor]) -> float:
    begin = time.process_time()
    for _ in range(REPEATS):
        torch.autograd.grad(function(), inputs, gradient)
    return (time.process_time() - begin) / REPEATS


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print("| B, T, c | ShortConvolution, ms | conv1d, relative | shifts, relative |")
    print("|---|---|---|---|")
    for name, shape in SIZES.items():
        module = ShortConvolution(POSITIONS, shape[2])
        torch.nn.init.normal_(module.weight)
        x, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
        inputs: list[Tensor] = [x, module.weight]
        ways: list[Callable[[], Tensor]] = [
            lambda x=x, module=module: module(x),
            lambda x=x, module=module: conv1d(x, module.weight.view(-1, POSITIONS)),
            lambda x=x, module=module: shifts(x, module.weight.view(-1, POSITIONS)),
        ]
        for way in ways[1:]:
            torch.testing.assert_close(way(), ways[0](), rtol=1e-4, atol=1e-4)
        rounds = [[seconds(way, gradient, inputs) for way in ways] for _ in range(ROUNDS)]
        one, two = (statistics.median(each[i] / each[0] for each in rounds) for i in (1, 2))
        ours = statistics.median(each[0] for each in rounds) * 1e3
        print(f"| {name}: {shape[0]}, {shape[1]}, {shape[2]} | {ours:.2f} | {one:.1f} | {two:.1f} |")


if __name__ == "__main__":
    main()

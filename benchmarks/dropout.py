"""Dropout by position against torch's nn.Dropout: processor time of forward and backward passes, as medians of paired ratios.

    OMP_NUM_THREADS=1 python benchmarks/dropout.py

A pair is one run of each, in the order ABBA, on one thread. What a micro-batch makes once for all is timed apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.models.dropout import drop, make_drops

SHAPES = ((8, 256, 384), (4, 1024, 768), (1, 2048, 2048))
PAIRS = 9


def seconds(run: Callable[[], Tensor], x: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Of the forward and of the backward pass."""
    begin = time.thread_time()
    y = run()
    middle = time.thread_time()
    torch.autograd.grad(y, x, gradient)
    return middle - begin, time.thread_time() - middle


def main() -> None:
    for batch, length, width in SHAPES:
        x = torch.randn(batch, length, width, requires_grad=True)
        gradient = torch.randn(batch, length, width)

        def drops(batch: int = batch, length: int = length, width: int = width):  # type: ignore[no-untyped-def]
            return make_drops(torch.tensor(1), layers=12, batch=batch, positions=torch.arange(length), width=width)

        made, theirs = drops().of(0), nn.Dropout(0.1)
        found, times, shared = [], [], []
        for i in range(PAIRS + 1):
            runs = [lambda x=x, made=made: drop(x, 0.1, made, 1), lambda x=x, theirs=theirs: theirs(x)]
            results = [seconds(run, x, gradient) for run in (runs if i % 2 else runs[::-1])]
            ours, other = results if i % 2 else results[::-1]
            begin = time.thread_time()
            drops()
            shared.append((time.thread_time() - begin) / sum(ours))
            if i:  # the first pair warms up
                found.append((ours[0] / other[0], ours[1] / other[1], sum(ours) / sum(other)))
                times.append((sum(ours) / x.numel() * 1e9, sum(other) / x.numel() * 1e9))
        forward, backward, both = (median(each) for each in zip(*found, strict=True))
        ns = [median(each) for each in zip(*times, strict=True)]
        print(
            f"({batch}, {length}, {width}): forward {forward:.2f}, backward {backward:.2f}, both {both:.2f} of nn.Dropout "
            f"({ns[0]:.1f} and {ns[1]:.1f} ns a value); numbers of a micro-batch: {median(shared):.2f} of one dropout"
        )


if __name__ == "__main__":
    main()

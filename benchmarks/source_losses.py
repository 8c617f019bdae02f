"""Cost of a loss for each data source: forward and backward of a micro-batch with and without these losses, alternating.

The ratio is the median over pairs of CPU time of the process, which other load affects less than wall time. The model has the
size of quickstart's; a micro-batch has 8 sequences of 256 tokens, from 8 sources.

    python benchmarks/source_losses.py [--pairs 40]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import LossSums, chunked_cross_entropy, cross_entropy
from lit_llm.training.accumulation import LossMeans

SEQUENCES, LENGTH, SOURCES = 8, 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=LENGTH, vocab_size=2048))
    ids = torch.randint(2048, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    sources = torch.arange(SEQUENCES) % SOURCES
    for name, loss in {
        "full logits": cross_entropy,
        "chunks of 1,024": partial(chunked_cross_entropy, chunk_size=1024),
    }.items():
        losses = LossMeans([f"source {i}" for i in range(SOURCES)])

        def step(function: Callable[..., LossSums], collected: LossMeans | None) -> float:
            begin = time.process_time()
            sums = model(ids[:, :-1], ids[:, 1:], loss=function)
            if collected is not None:
                collected.of({"sources": sources}, sums)
            sums.loss.backward()
            model.zero_grad()
            return time.process_time() - begin

        step(loss, None), step(partial(loss, by_row=True), losses)  # warm up
        seconds = [(step(loss, None), step(partial(loss, by_row=True), losses)) for _ in range(pairs)]
        ratio = statistics.median(b / a for a, b in seconds)
        added = statistics.median(b - a for a, b in seconds)
        print(
            f"{name}: {ratio:.4f} times the CPU time, {1e6 * added:+.0f} us of {statistics.median(a for a, _ in seconds):.3f} s"
        )


if __name__ == "__main__":
    main()

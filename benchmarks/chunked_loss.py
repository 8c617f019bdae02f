"""Chunked against full cross-entropy: time as medians of paired ratios, memory as peaks of fresh processes.

    python benchmarks/chunked_loss.py                                    # the size in the docs: N 8192, V 50304, d 768
    python benchmarks/chunked_loss.py --chunk-sizes 256 1024 --pairs 5
    python benchmarks/chunked_loss.py --rows 2048 --vocab 8192 --width 256 --dtypes float32

Each time covers one forward and backward pass. A pair is one run of a candidate and one of the full loss. The order within a
pair alternates, so that other load on the machine affects both. Memory is the growth of the peak resident size of the process.
It excludes hidden states and weight, and includes their gradients, which every candidate computes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.models.loss import chunked_cross_entropy, cross_entropy

Step = Callable[[], float]


def contender(name: str, rows: int, vocab: int, width: int, dtype: str) -> Step:
    """Return a function that runs forward and backward of a loss and returns the seconds.

    `name`: ``full``, ``chunked:SIZE``, or ``torch`` or ``torch:SIZE`` for torch's `linear_cross_entropy`."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    kind, _, size = name.partition(":")

    def loss() -> Tensor:
        if kind == "full":
            return cross_entropy(hidden, weight, targets, vocab_size=vocab).loss
        if kind == "chunked":
            return chunked_cross_entropy(hidden, weight, targets, vocab_size=vocab, chunk_size=int(size)).loss
        options = torch.nn.LinearCrossEntropyOptions(**({"batch_chunk_size": int(size)} if size else {}))
        # linear_cross_entropy ignores autocast, so cast as autocast would. The casts return float32 gradients.
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        return F.linear_cross_entropy(hidden.to(cast), weight.to(cast), targets, reduction="sum", options=options)

    def step() -> float:
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            total = loss()
        total.backward()
        return time.perf_counter() - start

    return step


def paired_ratios(candidate: Step, full: Step, pairs: int) -> tuple[list[float], float]:
    """Return (ratios candidate / full of `pairs` pairs with alternating order, the candidate's median seconds)."""
    candidate()
    full()
    ratios, seconds = [], []
    for i in range(pairs):
        if i % 2:
            b, a = full(), candidate()
        else:
            a, b = candidate(), full()
        ratios.append(a / b)
        seconds.append(a)
    return ratios, statistics.median(seconds)


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_memory(step: Step) -> int:
    before = peak_rss()
    step()
    step()
    return peak_rss() - before


def in_fresh_process(arguments: list[str]) -> int:
    command = [sys.executable, __file__, *arguments]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--torch", nargs="*", default=["torch"], help="torch's own losses: torch, torch:SIZE")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    make = partial(contender, rows=args.rows, vocab=args.vocab, width=args.width)
    if args.memory_of:
        print(measure_memory(make(args.memory_of, dtype=args.dtypes[0])))
        return

    rival = args.torch if hasattr(F, "linear_cross_entropy") else []
    names = [*(f"chunked:{size}" for size in args.chunk_sizes), *rival]
    sizes = ["--rows", str(args.rows), "--vocab", str(args.vocab), "--width", str(args.width)]
    print(f"N {args.rows}, V {args.vocab}, d {args.width}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in args.dtypes:
        memory = {name: in_fresh_process([*sizes, "--dtypes", dtype, "--memory-of", name]) / 1e9 for name in ["full", *names]}
        print(f"\n{dtype:18} time / full: median (min..max)   seconds   peak extra memory, GB   / full")
        print(f"{'full':18} {'1.00':36} {'':7} {memory['full']:14.2f} {'1.00':>18}")
        full = make("full", dtype=dtype)
        for name in names:
            ratios, seconds = paired_ratios(make(name, dtype=dtype), full, args.pairs)
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            print(
                f"{name:18} {spread:36} {seconds:7.2f} {memory[name]:14.2f} {memory[name] / memory['full']:18.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

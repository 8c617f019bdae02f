"""Time and memory of lit_llm's attention by kind of mask: medians of paired ratios, and peaks of fresh processes, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/attention.py                              # an hour on a busy machine
    OMP_NUM_THREADS=1 python benchmarks/attention.py --lengths 4096 --kinds window documents --pairs 5

Each kind of attention is compared with plain causal attention, and with a dense T×T mask (or T×T scores, for soft caps and
dropout). A pair is one run of lit_llm's attention and one of the other way. The order within a pair alternates, so that other
load on the machine affects both. Memory is the growth of the peak resident size of a process. It excludes queries, keys and
values, and includes their gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.models.attention import Visibility, attend
from lit_llm.models.dropout import drop_weights, make_drops

HEADS, WIDTH, WINDOW, DOCUMENT = 8, 64, 512, 512
KINDS: dict[str, dict[str, Any]] = {
    "window": {"window": WINDOW},
    "documents": {"documents": DOCUMENT},
    "short documents": {"documents": 16},
    "window and documents": {"window": WINDOW, "documents": DOCUMENT},
    "window, 2 key/value heads": {"window": WINDOW, "kv_heads": 2},
    "softcap": {"softcap": 30.0},
    "softcap and window": {"softcap": 30.0, "window": WINDOW},
    "dropout": {"dropout": 0.1},
}
WAYS = ("ours", "causal", "dense")
LARGEST_SCORES = 4096  # the most positions T for which T×T scores of all heads fit into memory several times


def step_of(kind: str, way: str, length: int) -> Callable[[], tuple[float, float]]:
    """Return a function that runs forward and backward and returns the seconds of both. `kind` is in KINDS, `way` in WAYS."""
    settings = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    kv_heads, window, mean = settings.get("kv_heads", HEADS), settings.get("window"), settings.get("documents")
    softcap, dropout = settings.get("softcap"), settings.get("dropout", 0.0)
    drawn = [torch.randn(1, length, heads, WIDTH, generator=generator) for heads in (HEADS, kv_heads, kv_heads)]
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in drawn)
    documents = None
    if mean is not None:
        documents = (torch.rand(1, length, generator=generator) < 1 / mean).long().cumsum(1)
    gradient = torch.randn(1, HEADS, length, WIDTH, generator=generator)
    grouped = kv_heads != HEADS

    def dense() -> Tensor:
        position = torch.arange(length)
        mask = position[:, None] >= position
        if window is not None:
            mask = mask & (position[:, None] - position < window)
        if documents is not None:
            mask = mask & (documents[:, :, None] == documents[:, None, :])
        if softcap is None and not dropout:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        if softcap is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)
        scores = softcap * torch.tanh(q @ k.transpose(-1, -2) / WIDTH**0.5 / softcap)
        return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v

    def ours() -> Tensor:
        made = make_drops(torch.tensor(0), layers=1, batch=1, positions=torch.arange(length), width=length)
        drops = drop_weights(made.of(0), dropout, HEADS, length)
        return attend(q, k, v, see=Visibility(window, documents), softcap=softcap, drops=drops)

    ways: dict[str, Callable[[], Tensor]] = {
        "ours": ours,
        "causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped),
        "dense": dense,
    }

    def step() -> tuple[float, float]:
        begin = time.perf_counter()
        y = ways[way]()
        middle = time.perf_counter()
        torch.autograd.grad(y, (q, k, v), gradient)
        return middle - begin, time.perf_counter() - middle

    return step


def ratios(kind: str, way: str, length: int, pairs: int) -> tuple[float, float]:
    """Return (forward, backward): medians over pairs of the time of lit_llm's attention divided by the time of `way`."""
    ours, other = step_of(kind, "ours", length), step_of(kind, way, length)
    found = []
    for i in range(pairs + 1):
        if i % 2:
            b, a = other(), ours()
        else:
            a, b = ours(), other()
        if i or not pairs:  # the first pair warms up
            found.append((a[0] / b[0], a[1] / b[1]))
    return median(f for f, _ in found), median(b for _, b in found)


def memory(kind: str, way: str, length: int) -> float:
    """Return the GB by which the memory of a fresh process grows in a forward and backward pass."""
    command = [sys.executable, __file__, "--memory-of", kind, way, str(length)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    return float(json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout))


def peak_growth(kind: str, way: str, length: int) -> float:
    step_of(kind, way, 128)()  # imports and kernels
    step = step_of(kind, way, length)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    step()
    return max(resident("VmHWM") - before, 1e-3)


def resident(field: str) -> float:
    """Return the GB of resident memory of this process: now (`field` VmRSS), or at the peak (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--pairs", type=int, default=3, help="pairs at 4096 positions and fewer; 1 beyond")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        kind, way, length = arguments.memory_of
        print(json.dumps(peak_growth(kind, way, int(length))))
        return
    print("| kind | T | forward, backward / causal | forward, backward / dense | GB | / causal | / dense |")
    print("|---|---|---|---|---|---|---|")
    for kind in arguments.kinds:
        for length in arguments.lengths:
            skipped = length > LARGEST_SCORES and ("softcap" in kind or "dropout" in kind)
            cells, used = [], {way: memory(kind, way, length) for way in WAYS if way != "dense" or not skipped}
            for way in WAYS[1:]:
                known = way in used
                times = ratios(kind, way, length, arguments.pairs if length <= 4096 else 0) if known else ()
                cells.append(", ".join(f"{ratio:.2f}" for ratio in times) or "—")
            shares = [f"{used['ours'] / used[way]:.2f}" if way in used else "—" for way in WAYS[1:]]
            print(f"| {kind} | {length:,} | {' | '.join(cells)} | {used['ours']:.2f} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()

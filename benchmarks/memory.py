"""Memory and time of a training step by mode of activation checkpointing.

    OMP_NUM_THREADS=1 python benchmarks/memory.py

Memory is the growth of a fresh process's resident size from before the first step to the peak of three steps. Time is CPU time
of one thread, as the median of paired ratios to the mode "none"; the modes alternate in one process, with half the layers and a
quarter of the batch.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median

import torch

from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallelize import parallelize
from lit_llm.models.gpt import GPT, GPTConfig

LONG = {"n_layer": 12, "n_head": 8, "n_embd": 256, "block_size": 512, "vocab_size": 1024}
MODES: tuple[str | int, ...] = ("none", "cheap", "attention", 2, "full")


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # KiB → GB, approximately


def build(mode: str | int, **settings: int) -> GPT:
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**LONG, **settings}))
    parallelize(model, ComputeConfig(activation_checkpointing=mode), torch.device("cpu"))
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def one_mode(mode: str) -> None:
    model, ids = build(int(mode) if mode.isdigit() else mode), torch.randint(0, 1024, (8, LONG["block_size"]))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = peak()
    for _ in range(3):
        model(ids, ids).loss.backward()
    print(json.dumps(peak() - before))


def recompute() -> None:
    memory = {}
    for mode in MODES:
        done = subprocess.run([sys.executable, __file__, "--mode", str(mode)], capture_output=True, text=True, check=True)
        memory[mode] = json.loads(done.stdout.splitlines()[-1])
    models, ids = {mode: build(mode, n_layer=6) for mode in MODES}, torch.randint(0, 1024, (2, LONG["block_size"]))
    seconds: dict[str | int, list[float]] = {mode: [] for mode in MODES}
    for _ in range(7):
        for mode, model in models.items():
            start = time.process_time()
            model(ids, ids).loss.backward()
            seconds[mode].append(time.process_time() - start)
    print("mode       GB     / none   time")
    for mode in MODES:
        ratios = sorted(a / b for a, b in zip(seconds[mode][1:], seconds["none"][1:], strict=True))
        share = memory[mode] / memory["none"]
        print(f"{mode!s:9s}  {memory[mode]:.2f}  {share:9.2f}  {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", help="used internally, for one process")
    mode = parser.parse_args().mode
    recompute() if mode is None else one_mode(mode)

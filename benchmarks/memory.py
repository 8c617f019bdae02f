"""Memory of one rank by strategy and by activation checkpointing mode: peak resident memory of fresh processes.

    OMP_NUM_THREADS=1 python benchmarks/memory.py strategies     # DDP and FSDP2 on 2 and 4 processes
    OMP_NUM_THREADS=1 python benchmarks/memory.py recompute      # compute.activation_checkpointing, and its time

The figure is the growth from before the model is built to the peak of three steps. It includes gloo's buffers. glibc keeps
freed blocks of up to 32 MB, such as the gathered weights of a layer, so it is configured to return them. Time is CPU time of
one thread, as the median of paired ratios to "none". The modes alternate in one process, with half the layers and a quarter
of the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallelize import parallelize
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.training.language_model import LanguageModel

ROOT = Path(__file__).parents[1]
LARGE = {"n_layer": 8, "n_head": 12, "n_embd": 768, "block_size": 128, "vocab_size": 8192}
LONG = {"n_layer": 12, "n_head": 8, "n_embd": 256, "block_size": 512, "vocab_size": 1024}
MODES: tuple[str | int, ...] = ("none", "cheap", "attention", 2, "full")


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # KiB → GB, approximately


def one_rank(strategy: str) -> None:
    """Run three steps in a process started by `run_ranks`, and report how much the process grew."""
    from launch import report
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lit_llm.distributed.mesh_strategy import MeshStrategy

    ids = torch.randint(0, LARGE["vocab_size"], (12, LARGE["block_size"]))
    data = DataLoader([{"input_ids": i, "targets": i} for i in ids], batch_size=1)
    module = LanguageModel(GPTConfig(**LARGE), lambda groups: torch.optim.AdamW(groups, lr=1e-4, fused=True))
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=MeshStrategy() if strategy == "fsdp2" else strategy,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = peak()
    trainer.fit(module, data)
    assert module.model is not None
    report(grown=peak() - before, parameters=GPT(GPTConfig(**LARGE)).num_parameters())


def strategies() -> None:
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    sys.path.insert(0, str(ROOT / "tests"))
    from launch import run_ranks

    print("processes  strategy  GB of rank 0  bytes per parameter")
    for ranks, strategy in ((1, "auto"), (2, "ddp"), (2, "fsdp2"), (4, "ddp"), (4, "fsdp2")):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(Path(__file__), ranks, Path(folder), "rank", strategy, timeout=600, popen=subprocess.Popen)[0]
        print(
            f"{ranks:9d}  {strategy:8s}  {found['grown']:12.2f}  {found['grown'] * 1e9 / found['parameters']:17.1f}", flush=True
        )


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
        done = subprocess.run([sys.executable, __file__, "mode", str(mode)], capture_output=True, text=True, check=True)
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
    parser.add_argument(
        "what", choices=["strategies", "recompute", "rank", "mode"], help="rank and mode are used internally, for one process"
    )
    parser.add_argument("which", nargs="?", default="")
    options = parser.parse_args()
    if options.what in ("rank", "mode"):
        {"rank": one_rank, "mode": one_mode}[options.what](options.which)
    else:
        {"strategies": strategies, "recompute": recompute}[options.what]()

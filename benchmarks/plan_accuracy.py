"""Predictions of `plan` against measured training steps, on a CPU, for 36 configurations.

It compares parameters, peak memory (from the allocator's log), FLOPs (from torch's counter), and the time of a step. The time
of each of the first ten is predicted from speeds fitted to the nine others. Times are CPU times of one thread, which other load
affects little, and the configurations alternate, so that the rest affects all equally.

    python benchmarks/plan_accuracy.py [--rounds 7] [--no-time]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.lora import LoRAConfig
from lit_llm.models.loss import LossConfig
from lit_llm.optim import Lion, MuonAdamW
from lit_llm.plan import Optimizer, RunSettings
from lit_llm.plan.speed import Work, amounts, cpu_seconds, work_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from training_step import TrainingStep, predict

ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)
GPT2 = {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False}
LLAMA = {"mlp": "swiglu", "qk_norm": False}
ODD = {"n_layer": 5, "n_embd": 84, "n_head": 7, "vocab_size": 1001}
SMALL = {"n_layer": 4, "n_embd": 256, "vocab_size": 2048}


@dataclass
class Case:
    name: str
    model: dict[str, Any]
    optimizer: Any = ADAMW
    sequences: int = 4
    accumulation: int = 1
    precision: str = "32-true"
    chunk_size: int | None = None
    checkpointing: Any = "none"
    lora: LoRAConfig | None = None

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(**{"n_head": 4, "block_size": 256, **self.model})

    def step(self) -> TrainingStep:
        return TrainingStep(
            self.config,
            self.optimizer,
            sequences=self.sequences,
            accumulation=self.accumulation,
            precision=self.precision,
            loss=LossConfig(chunk_size=self.chunk_size),
            compute=ComputeConfig(activation_checkpointing=self.checkpointing),
            lora=self.lora,
        )

    @property
    def settings(self) -> RunSettings:
        factory = getattr(self.optimizer, "func", self.optimizer)
        options = getattr(self.optimizer, "keywords", {})
        return RunSettings(
            self.config,
            Optimizer(factory.__name__, more_states="momentum" in options, fused="fused" in options),
            steps=1,
            global_batch=self.sequences * self.accumulation,
            micro_batch=self.sequences,
            precision=self.precision,
            chunk_size=self.chunk_size,
            compute=ComputeConfig(self.checkpointing),
            lora=self.lora,
        )


TEN = [
    Case("4 × 256, Muon", {"n_layer": 4, "n_embd": 256, "vocab_size": 2048}, MuonAdamW),
    Case("GPT-2 block, tied head", {"n_layer": 4, "n_embd": 384, "n_head": 6, "vocab_size": 8192, **GPT2}, sequences=2),
    Case("wide and shallow", {"n_layer": 2, "n_embd": 768, "n_head": 12, "vocab_size": 2048, **GPT2}, sequences=2),
    Case("narrow and deep", {"n_layer": 16, "n_embd": 128, "n_head": 2, "vocab_size": 1024}),
    Case(
        "LLaMA block, grouped queries",
        {"n_layer": 4, "n_embd": 512, "n_head": 8, "n_kv_head": 2, "mlp_width": 1376, "vocab_size": 4096, **LLAMA},
        sequences=2,
    ),
    Case("context 1,024", {"n_layer": 4, "n_embd": 256, "block_size": 1024, "vocab_size": 1024}, sequences=1),
    Case(
        "vocabulary 50,257 in chunks", {"n_layer": 3, "n_embd": 256, "vocab_size": 50257, **GPT2}, sequences=2, chunk_size=128
    ),
    Case("vocabulary 32,000, Lion", {"n_layer": 3, "n_embd": 256, "vocab_size": 32000}, Lion, sequences=2),
    Case(
        "three micro-batches", {"n_layer": 4, "n_embd": 384, "block_size": 128, "vocab_size": 2048}, sequences=2, accumulation=3
    ),
    Case("full checkpointing", {"n_layer": 6, "n_embd": 256, "vocab_size": 2048, **LLAMA}, checkpointing="full"),
]
MEMORY_ONLY = [
    Case("bf16-mixed", {"n_layer": 4, "n_embd": 384, "vocab_size": 4096}, precision="bf16-mixed"),
    Case(
        "bf16-mixed, chunks", {"n_layer": 4, "n_embd": 256, "vocab_size": 8192, **LLAMA}, precision="bf16-mixed", chunk_size=256
    ),
    Case(
        "bf16-true, every third block",
        {"n_layer": 8, "n_embd": 256, "vocab_size": 2048},
        precision="bf16-true",
        checkpointing=3,
    ),
    Case("cheap checkpointing", {"n_layer": 8, "n_embd": 256, "vocab_size": 2048, **LLAMA}, checkpointing="cheap"),
    Case("attention checkpointing", {"n_layer": 8, "n_embd": 256, "vocab_size": 2048}, checkpointing="attention"),
    Case("sliding window, dropout", {"n_layer": 3, "n_embd": 256, "vocab_size": 1024, "window": 64, "dropout": 0.1}),
    Case("documents masked", {"n_layer": 3, "n_embd": 256, "vocab_size": 1000, "mask_documents": True, "eos_id": 0}),
    Case(
        "cheap checkpointing, dropout",
        {"n_layer": 5, "n_embd": 84, "n_head": 7, "block_size": 777, "vocab_size": 2048, "dropout": 0.2},
        checkpointing="cheap",
    ),
    Case(
        "sandwich norms, soft caps",
        {**SMALL, "norm_position": "sandwich", "attention_softcap": 50.0, "logit_softcap": 30.0, **LLAMA},
    ),
    Case("post norm, projection QK-norm", {**SMALL, "norm_position": "post", "qk_norm_width": "projection", "mlp": "swiglu"}),
    Case(
        "windows by layer, bf16-mixed",
        {**SMALL, "n_layer": 6, "layers": {"window": [64, 64, None]}, "n_kv_head": 2, **LLAMA},
        precision="bf16-mixed",
    ),
    Case("documents and a window", {**SMALL, "mask_documents": True, "eos_id": 0, "window": 100}),
    Case("sinks, windows by layer", {**SMALL, "attention_sinks": True, "layers": {"window": [32, None]}, **LLAMA}),
    Case("GPT-NeoX", {**SMALL, **GPT2, "position": "rope", "parallel_residual": True, "partial_rotary_factor": 0.25}),
    Case(
        "Gemma",
        {
            **SMALL,
            "norm_unit_offset": True,
            "norm_position": "sandwich",
            "embedding_scale": 16.0,
            "mlp": "geglu",
            "tie_embeddings": True,
            "head_dim": 96,
            "n_kv_head": 1,
            "layers": {"window": [64, 64, 64, None], "rope_theta": [1e4, 1e4, 1e4, 1e6]},
        },
    ),
    Case("Granite", {**SMALL, "residual_scale": 0.22, "embedding_scale": 12.0, "logit_scale": 0.125, "n_kv_head": 2, **LLAMA}),
    Case("LoRA", {**SMALL, **LLAMA}, lora=LoRAConfig(rank=8)),
    Case("LoRA, base in bf16", {**SMALL, "n_kv_head": 2, **LLAMA}, lora=LoRAConfig(rank=4), precision="bf16-true"),
    Case("odd sizes, cheap, dropout", {**ODD, "block_size": 777, "dropout": 0.2}, checkpointing="cheap", sequences=9),
    Case("odd sizes, one sequence, in chunks", ODD, sequences=1, chunk_size=100),
    Case("one token", {**SMALL, "block_size": 1}, sequences=1),
    Case("one block, one key head, Muon", {"n_layer": 1, "n_embd": 256, "vocab_size": 2048, "n_kv_head": 1}, MuonAdamW),
    Case("Lion, bf16-true", {**SMALL, **LLAMA}, Lion, precision="bf16-true"),
    Case("full checkpointing, dropout, bf16-mixed", {**SMALL, "dropout": 0.1}, checkpointing="full", precision="bf16-mixed"),
    Case(
        "cheap checkpointing, window, documents",
        {**SMALL, "window": 100, "mask_documents": True, "eos_id": 0},
        checkpointing="cheap",
    ),
    Case("SGD with momentum, odd vocabulary", {**SMALL, "vocab_size": 1001}, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
]


def fit_speeds(works: Sequence[Work], seconds: Sequence[float]) -> list[float]:
    """Seconds per unit of `amounts`, none negative, by least squares of the relative error over every subset of units."""
    rows = np.array([amounts(work) for work in works]) / np.array(seconds)[:, None]  # (n, 6): each row should sum to 1
    scale = rows.max(axis=0)
    done = [i for i in range(len(scale)) if scale[i] > 0]
    best, best_error = np.zeros(len(scale)), float("inf")
    for count in range(1, min(len(done), len(works)) + 1):
        for columns in map(list, itertools.combinations(done, count)):
            found, *_ = np.linalg.lstsq(rows[:, columns] / scale[columns], np.ones(len(rows)), rcond=None)
            error = float(((rows[:, columns] / scale[columns] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error - 1e-9:
                best, best_error = np.zeros(len(scale)), error
                best[columns] = found / scale[columns]
    return [float(value) for value in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="number of timed steps per configuration")
    parser.add_argument("--no-time", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| configuration | parameters | peak MB, predicted | measured | ratio | GFLOP, predicted | counted | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for case in [*TEN, *MEMORY_ONLY]:
        parameters, memory, flops = predict(case.settings, cuda=False)
        step = case.step()
        assert step.parameters() == parameters, case.name
        peak, counted = step.peak_bytes(), step.flops()
        print(
            f"| {case.name} | {parameters:,} | {memory / 1e6:.1f} | {peak / 1e6:.1f} | {memory / peak:.4f} "
            f"| {flops / 1e9:.2f} | {counted / 1e9:.2f} | {flops / counted:.4f} |",
            flush=True,
        )
    if not options.no_time:
        time_table(options.rounds)


def time_table(rounds: int) -> None:
    steps = [case.step() for case in TEN]
    for step in steps:
        step()
    seconds: list[list[float]] = [[] for _ in TEN]
    for _ in range(rounds):
        for step, taken in zip(steps, seconds, strict=True):
            start = time.process_time()
            step()
            taken.append(time.process_time() - start)
    medians = [statistics.median(taken) for taken in seconds]
    works = [work_of(case.settings, cuda=False) for case in TEN]
    print("\n| configuration | ms, predicted | measured | lowest to highest | ratio |\n|---|---|---|---|---|")
    for i, case in enumerate(TEN):
        others = [j for j in range(len(TEN)) if j != i]
        speeds = fit_speeds([works[j] for j in others], [medians[j] for j in others])
        guess, taken = cpu_seconds(works[i], speeds), seconds[i]
        spread = f"{min(taken) * 1e3:.0f} to {max(taken) * 1e3:.0f}"
        print(f"| {case.name} | {guess * 1e3:.0f} | {medians[i] * 1e3:.0f} | {spread} | {guess / medians[i]:.3f} |")
    speeds = fit_speeds(works, medians)
    print("\nfitted to all ten, seconds per unit:", ", ".join(f"{value:.3g}" for value in speeds))
    print(
        "work:",
        [[float(f"{amount:.4g}") for amount in astuple(work)] for work in works],
        "medians:",
        [round(m, 4) for m in medians],
    )


if __name__ == "__main__":
    main()

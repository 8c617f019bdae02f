"""Compare predictions of `plan` with measured training steps on a CPU, for 36 configurations.

The script compares parameters, peak memory (from the allocator's log) and FLOPs (from torch's FlopCounterMode).

    python benchmarks/plan_accuracy.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.lora import LoRAConfig
from lit_llm.models.loss import LossConfig
from lit_llm.optim import Lion, MuonAdamW
from lit_llm.plan import Optimizer, PlannedRun

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
    def settings(self) -> PlannedRun:
        factory = getattr(self.optimizer, "func", self.optimizer)
        options = getattr(self.optimizer, "keywords", {})
        return PlannedRun(
            self.config,
            Optimizer(factory.__name__, more_states="momentum" in options, fused="fused" in options),
            max_steps=1,
            global_batch_size=self.sequences * self.accumulation,
            micro_batch_size=self.sequences,
            precision=self.precision,
            loss=LossConfig(self.chunk_size),
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


def main() -> None:
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


if __name__ == "__main__":
    main()

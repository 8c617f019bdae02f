"""Compare the planned peak memory of the rank that needs most with the allocator's log, on gloo processes of a CPU.

    python benchmarks/plan_accuracy_ranks.py --ranks 2 [--only NAME ...]

The processes train a small model with one layout after another. `PlanWatch` of lit_llm/certify/watch.py measures memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lit_llm.certify.watch import PlanWatch
from lit_llm.data import TextFiles
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.lora import LoRAConfig
from lit_llm.models.loss import LossConfig
from lit_llm.optim import MuonAdamW
from lit_llm.training.language_model import LanguageModel

SIZE = {"n_layer": 6, "n_head": 4, "n_embd": 256, "block_size": 128, "vocab_size": 2048}
ADAMW = partial(torch.optim.AdamW, fused=True)
BF16 = {"precision": "bf16-mixed"}
MUON = {"optimizer": MuonAdamW}
FREED = {"reshard_after_forward": True, "reduce_each_micro_batch": True}
KEPT = {"reshard_after_forward": False, "reduce_each_micro_batch": False}
# Each token goes to all experts, so that ranks have equally many rows, as the plan assumes.
EXPERTS = {"model": {"mlp": "swiglu", "moe": {"experts": 4, "top_k": 4, "expert_width": 128, "shared_experts": 1}}}
LATENT: dict[str, Any] = {
    "model": {
        "qk_norm": False,
        "latent": {"kv_rank": 48, "query_rank": 64, "nope_head_dim": 24, "rope_head_dim": 16, "value_head_dim": 32},
    }
}
AHEAD: dict[str, Any] = {"model": {"predict_ahead": 2}}
TIED = {"model": {"tie_embeddings": True}}


def mesh(ranks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"strategy": ranks, **more}


def pipe(schedule: str, **more: Any) -> dict[str, Any]:
    return {"strategy": {"shard": 1, "pipeline": 2, "schedule": schedule}, "micro_batches": 4, **more}


LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {},
        "ddp, gradient views": {"ddp": {"gradient_as_bucket_view": True}},
        "ddp, 3 micro-batches, bf16-mixed": {"micro_batches": 3, **BF16},
        "ddp, tied, Muon": {**TIED, **MUON},
        "fsdp2": mesh(FREED),
        "fsdp2, prefetch 0": mesh({**FREED, "prefetch": 0}),
        "fsdp2, prefetch 2, tied": mesh({**FREED, "prefetch": 2}, **TIED),
        "fsdp2, weights kept": mesh(KEPT),
        "fsdp2, 3 micro-batches": mesh(FREED, micro_batches=3),
        "fsdp2, weights and gradients kept, 3 micro-batches": mesh(KEPT, micro_batches=3),
        "fsdp2, weights kept, 3 micro-batches": mesh({**FREED, "reshard_after_forward": False}, micro_batches=3),
        "fsdp2, bf16-mixed": mesh(FREED, **BF16),
        "fsdp2, bf16-mixed, weights kept": mesh(KEPT, **BF16),
        "fsdp2, bf16-true": mesh(FREED, precision="bf16-true"),
        "fsdp2, full recomputation": mesh(FREED, checkpointing="full"),
        "fsdp2, Muon": mesh(FREED, **MUON),
        "fsdp2, loss in chunks": mesh(FREED, chunk_size=64),
        "hsdp of 2 replicas": mesh({**FREED, "replicate": 2}),
        "tp": mesh({"tensor_parallel": 2}),
        "tp, bf16-mixed": mesh({"tensor_parallel": 2}, **BF16),
        "tp, tied": mesh({"tensor_parallel": 2}, **TIED),
        "tp, Muon": mesh({"tensor_parallel": 2}, **MUON),
        "tp, full recomputation": mesh({"tensor_parallel": 2}, checkpointing="full"),
        "tp, dropout": mesh({"tensor_parallel": 2}, model={"dropout": 0.1}),
        "tp, 125 positions": mesh({"tensor_parallel": 2}, length=125),
        "tp, dropout, 125 positions": mesh({"tensor_parallel": 2}, length=125, model={"dropout": 0.1}),
        "cp, keys gathered": mesh({**FREED, "context": 2}),
        "cp, heads": mesh({**FREED, "context": 2, "context_attention": "heads"}),
        "cp, keys gathered, bf16-mixed, weights kept": mesh({**KEPT, "context": 2}, **BF16),
        "cp, heads, full recomputation": mesh({**FREED, "context": 2, "context_attention": "heads"}, checkpointing="full"),
        "ep": mesh({**FREED, "expert": 2}, **EXPERTS),
        "ep, weights and gradients kept, 3 micro-batches": mesh({**KEPT, "expert": 2}, micro_batches=3, **EXPERTS),
        "ep, bf16-mixed, full recomputation": mesh({**FREED, "expert": 2}, checkpointing="full", **BF16, **EXPERTS),
        "ep, Muon": mesh({**FREED, "expert": 2}, **MUON, **EXPERTS),
        "tp with experts": mesh({"tensor_parallel": 2}, **EXPERTS),
        "ep × tp": mesh({"tensor_parallel": 2, "expert": 2}, **EXPERTS),
        "cp with experts": mesh({**FREED, "context": 2}, **EXPERTS),
        "pp with experts": pipe("1f1b", **EXPERTS),
        "pp, 1f1b": pipe("1f1b"),
        "pp, 1f1b, tied, bf16-mixed": pipe("1f1b", **TIED, **BF16),
        "pp, gpipe": pipe("gpipe"),
        "pp, gpipe, full recomputation": pipe("gpipe", checkpointing="full"),
        "pp, interleaved1f1b": pipe("interleaved1f1b"),
        "pp, interleaved1f1b, bf16-mixed, 16 micro-batches": pipe("interleaved1f1b", **{**BF16, "micro_batches": 16}),
        "pp, zbv": pipe("zbv"),
        "pp, zbv, bf16-mixed, 16 micro-batches": pipe("zbv", **{**BF16, "micro_batches": 16}),
        "pp, zbv, full recomputation": pipe("zbv", checkpointing="full"),
        "pp, dualpipev": pipe("dualpipev"),
        "pp, 1f1b, Muon": pipe("1f1b", **MUON),
        "fsdp2, tokens ahead": mesh(FREED, **AHEAD),
        "tp, tokens ahead": mesh({"tensor_parallel": 2}, **AHEAD),
        "cp, tokens ahead": mesh({**FREED, "context": 2}, **AHEAD),
        "pp, 1f1b, tokens ahead": pipe("1f1b", **AHEAD),
        "cp, keys gathered, latents": mesh({**FREED, "context": 2}, **LATENT),
        "cp, heads, latents": mesh({**FREED, "context": 2, "context_attention": "heads"}, **LATENT),
        "tp, latents": mesh({"tensor_parallel": 2}, **LATENT),
    },
    4: {
        "ddp": {},
        "fsdp2": mesh(FREED),
        "fsdp2, bf16-mixed, weights kept": mesh(KEPT, **BF16),
        "fsdp2, Muon": mesh(FREED, **MUON),
        "hsdp": mesh({**FREED, "replicate": 2}),
        "hsdp, 3 micro-batches, bf16-mixed": mesh({**FREED, "replicate": 2}, micro_batches=3, **BF16),
        "tp": mesh({"tensor_parallel": 4}),
        "fsdp2 × tp": mesh({**FREED, "tensor_parallel": 2}),
        "fsdp2 × tp, bf16-mixed": mesh({**FREED, "tensor_parallel": 2}, **BF16),
        "cp of 4": mesh({**FREED, "context": 4}),
        "fsdp2 × cp": mesh({**FREED, "context": 2}),
        "fsdp2 × cp, heads": mesh({**FREED, "context": 2, "context_attention": "heads"}),
        "cp × tp": mesh({**FREED, "context": 2, "tensor_parallel": 2}),
        "cp × tp, 121 positions, dropout": mesh(
            {**FREED, "context": 2, "tensor_parallel": 2}, length=121, model={"dropout": 0.1}
        ),
        "pp of 4": {"strategy": {"shard": 1, "pipeline": 4}, "micro_batches": 4},
        "pp × fsdp2": {"strategy": {"pipeline": 2}, "micro_batches": 4},
        "pp × fsdp2, zbv": {"strategy": {"pipeline": 2, "schedule": "zbv"}, "micro_batches": 4},
        "pp × tp": {"strategy": {"pipeline": 2, "tensor_parallel": 2}, "micro_batches": 4},
        "pp × cp": {"strategy": {"pipeline": 2, "context": 2}, "micro_batches": 4},
        "pp × ddp": {"strategy": {"pipeline": 2, "replicate": 2}, "micro_batches": 4},
    },
}


def measure(job: dict[str, Any], world: int, folder: Path) -> tuple[int, int]:
    """Train with the layout `job`. Return (planned peak, measured peak) in bytes of the rank that needs most.

    Every rank calls this function. `world`: number of ranks. `folder`: folder for the training text."""
    text = folder / f"text-{os.environ['RANK']}.txt"
    text.write_text("a line of text, and another one\n" * 3000)
    strategy = MeshStrategy(**job["strategy"]) if "strategy" in job else DDPStrategy(**job.get("ddp", {}))
    micro_batches = job.get("micro_batches", 1)
    ranks = strategy.sizes(world).data_parallel if isinstance(strategy, MeshStrategy) else world
    length = job.get("length", SIZE["block_size"])
    data = TextFiles(paths=str(text), micro_batch_size=2, global_batch_size=2 * ranks * micro_batches, block_size=length)
    watch = PlanWatch()
    trainer = Trainer(
        max_steps=6,
        callbacks=[watch],
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        precision=job.get("precision", "32-true"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    model = LanguageModel(
        GPTConfig(**{**SIZE, **job.get("model", {})}),
        job.get("optimizer", ADAMW),
        LossConfig(chunk_size=job.get("chunk_size")),
        ComputeConfig(activation_checkpointing=job.get("checkpointing", "none")),
        lora=LoRAConfig(rank=job["lora"]) if "lora" in job else None,
    )
    with watch:
        trainer.fit(model, datamodule=data)
    return watch.figures["memory"]["planned"], watch.figures["memory"]["measured"]


def main(layouts: dict[str, dict[str, Any]]) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    prints, world = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"])
    if prints:
        print("| layout | MB, planned | measured | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, job in layouts.items():
            planned, measured = measure(job, world, Path(folder))
            if prints:
                print(f"| {name} | {planned / 1e6:.1f} | {measured / 1e6:.1f} | {planned / measured:.3f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=LAYOUTS)
    parser.add_argument("--only", nargs="*", help="names of layouts")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks), *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)
    main({name: job for name, job in LAYOUTS[options.ranks].items() if not options.only or name in options.only})

"""Trains for real on gloo processes, and beforehand runs the same jobs dry. Tests start it with `launch.run_ranks`.

    python dry_run_script.py JOBS.json      one process per rank

Each job is a dict of arguments of `objects`. Reports for each job what was counted in the second optimizer step, and on the
first and the last rank what a dry run says. A process can be one rank of one cluster, so each dry run has a process of its own.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from dry_run import Batch, Cluster, DryRun
from layouts import OPTIMIZERS, SIZE
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from live_memory import LiveMemory
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lit_llm.callbacks import GradientNorm
from lit_llm.core.dtensor import local_part
from lit_llm.core.memory import without_garbage_collection
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.traffic import Traffic
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.training.language_model import LanguageModel

SEQUENCES, VOCABULARY = 2, 256


def objects(job: dict[str, Any]) -> tuple[LanguageModel, MeshStrategy]:
    config = GPTConfig(**{**SIZE, "n_layer": 3, "vocab_size": VOCABULARY, **job.get("model", {})})
    model = LanguageModel(
        config,
        OPTIMIZERS[job.get("optimizer", "AdamW-fused")],
        LossConfig(**job.get("loss", {})),
        ComputeConfig(**job.get("compute", {})),
    )
    return model, MeshStrategy(**job["strategy"])


class Random(IterableDataset[dict[str, Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            ids = torch.randint(0, VOCABULARY, (SEQUENCES, self.length + 1))
            yield {"input_ids": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()}


class Data(LightningDataModule):
    def __init__(self, length: int, *, every_target_counts: bool) -> None:
        super().__init__()
        self.length, self.every_target_counts = length, every_target_counts

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Random(self.length), batch_size=None)


class Watch(Callback):
    """Counts the second step, in which the optimizer has its state. Its first micro-batch follows the end of the first step."""

    def __init__(self) -> None:
        self.memory, self.found = LiveMemory(), {}
        self.traffic: Traffic | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.memory.__enter__()
        self.memory.name([*pl_module.parameters(), *pl_module.buffers()], "held")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 1 and self.traffic is None:
            self.memory.restart()
            self.traffic = Traffic(*filter(None, (trainer.strategy.device_mesh, trainer.strategy.data_mesh)))
            self.traffic.__enter__()
        elif trainer.global_step == 2:
            self.traffic.__exit__(None, None, None)
            self.memory.__exit__(None, None, None)
            self.found = {
                "collectives": sorted(list(row) for row in self.traffic.rows()),
                "parameters": sum(local_part(p).numel() for p in pl_module.parameters()),
                "peak": sum(self.memory.at_peak().values()),
            }


def real(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    model, strategy = objects(job)
    watch = Watch()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        precision=job.get("precision", "32-true"),
        max_steps=2,
        accumulate_grad_batches=job.get("micro_batches", 1),
        callbacks=[GradientNorm(1.0), watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
    )
    gc.collect()
    with without_garbage_collection():
        data = Data(model.config.block_size, every_target_counts=job.get("every_target_counts", True))
        trainer.fit(model, datamodule=data)
    return watch.found


def dry(job: dict[str, Any], rank: int, ranks: int, *, in_full: bool) -> dict[str, Any]:
    """In a process of its own, which must not have begun anything."""
    file = Path(f"dry-{rank}.json")
    child = os.fork()
    if child == 0:
        try:
            model, strategy = objects(job)
            counts = {"every_target_counts": job.get("every_target_counts", True)}
            batch = Batch(SEQUENCES, model.config.block_size, job.get("micro_batches", 1), VOCABULARY, **counts)
            run = DryRun(
                Cluster(1, ranks), batch, model, strategy, job.get("precision", "32-true"), [GradientNorm(1.0)], {}, False
            ).rank(rank, in_full=in_full)
            rows = sorted(list(row) for row in run.collectives)
            found = {"collectives": rows, "parameters": run.parameters, "peak": run.peak, "counted": run.counted}
            file.write_text(json.dumps(found))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, f"the dry run of {job} failed"
    return json.loads(file.read_text())


if __name__ == "__main__":
    from launch import report

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    jobs: dict[str, dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {name: {} for name in jobs}
    if rank in (0, ranks - 1):
        for name, job in jobs.items():
            results[name]["dry"] = dry(job, rank, ranks, in_full=False)
            if job.get("micro_batches", 1) > 3:
                results[name]["in full"] = dry(job, rank, ranks, in_full=True)
    for name, job in jobs.items():
        results[name]["real"] = real(job, ranks)
    report(**results)

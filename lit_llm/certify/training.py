"""Trains a tiny model, in a process for each device.

    python -m lit_llm.certify.training FOLDER SECONDS   as one rank, with WORLD_SIZE, RANK and LOCAL_RANK: FOLDER/jobs.json

Each job's losses are written when it ends, so that they remain if a device dies in a later one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from lit_llm.callbacks import Cosine, GradientNorm, StepCheckpoint, StepSeed
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO, FolderCheckpointIO
from lit_llm.core.errors import UserError
from lit_llm.data import TextFiles
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.optim import MuonAdamW
from lit_llm.tokenizers import Bytes
from lit_llm.training.language_model import LanguageModel

TEXT = "".join(f"line {i} of a text that repeats itself, {i * i} and {i % 7}\n" for i in range(600))


class Losses(Callback):
    """The loss of every step."""

    def __init__(self, kill_at: int | None) -> None:
        self.losses: dict[int, float] = {}
        self.kill_at = kill_at

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        value = trainer.callback_metrics.get("train/loss")
        if value is not None:
            self.losses[trainer.global_step] = float(value)
        if trainer.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path,
    *,
    strategy: str | dict[str, Any] = "auto",
    ranks: int = 1,
    precision: str = "32-true",
    compile: bool = False,
    activation_checkpointing: str = "none",
    optimizer: str = "AdamW",
    steps: int = 20,
    accelerator: str = "cpu",
    save: str | None = None,
    sharded: bool = False,
    background: bool = False,
    resume: str | None = None,
    kill_at: int | None = None,
) -> dict[str, float]:
    """Train on FOLDER/text.txt; the loss of each step.

    Args:
        save: folder of a checkpoint after every third step; `sharded` by all ranks, in the `background`.
        resume: the checkpoint to continue from.
        kill_at: the step after which each rank kills itself.
    """
    seed_everything(1, verbose=False)
    torch.compiler.reset()
    data = TextFiles(paths=[str(folder / "text.txt")], tokenizer=Bytes(), micro_batch_size=1, global_batch_size=8)
    config = GPTConfig(n_layer=2, n_head=8, n_embd=64, block_size=32)
    data.block_size = config.block_size
    module = LanguageModel(
        config,
        MuonAdamW if optimizer == "Muon" else lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
        LossConfig(),
        ComputeConfig(compile=compile, activation_checkpointing=activation_checkpointing),  # type: ignore[arg-type]
    )
    losses = Losses(kill_at)
    callbacks: list[Any] = [Cosine(warmup_steps=2, total_steps=20), GradientNorm(1.0), StepSeed(3)]
    if save is not None:
        callbacks.append(StepCheckpoint(3, monitor=None, dirpath=str(folder / save), keep_last=9))
    chosen: Any = MeshStrategy(**strategy) if isinstance(strategy, dict) else strategy
    if isinstance(chosen, MeshStrategy):
        chosen.sharded_checkpoints = sharded
    if chosen == "ddp":
        chosen = DDPStrategy(gradient_as_bucket_view=True)
    trainer = Trainer(
        accelerator=accelerator,
        devices=ranks,
        strategy=chosen,
        precision=precision,  # type: ignore[arg-type]
        max_steps=steps,
        logger=False,
        callbacks=[*callbacks, losses],
        enable_checkpointing=save is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.strategy.checkpoint_io = AsyncFolderCheckpointIO() if background else FolderCheckpointIO()
    trainer.fit(module, datamodule=data, ckpt_path=None if resume is None else folder / resume, weights_only=True)
    return {str(step): value for step, value in losses.losses.items()}


def main(folder: Path, seconds: float) -> None:
    """Run the jobs of a folder one after another, as one rank, while there is time."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    jobs: dict[str, dict[str, Any]] = json.loads((folder / "jobs.json").read_text())
    deadline, rank = time.monotonic() + seconds, int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])  # Lightning removes it when a training ends
    for name, job in jobs.items():
        result: dict[str, Any] = {"name": name}
        try:
            result["losses"] = train(folder, ranks=world, **job)
        except UserError as error:
            result["refused"] = str(error)
        except Exception as error:
            _write(
                folder, rank, {**result, "failed": f"{type(error).__name__} on device {rank}: {str(error).splitlines()[:1]}"}
            )
            raise
        _write(folder, rank, result)
        late = torch.tensor(float(time.monotonic() > deadline))
        if torch.distributed.is_initialized():  # all ranks stop after the same job
            late = late.to(torch.accelerator.current_accelerator() or "cpu") if job.get("accelerator") == "cuda" else late
            torch.distributed.all_reduce(late)
        if late:
            return


def _write(folder: Path, rank: int, result: dict[str, Any]) -> None:
    with open(folder / f"results-{rank}.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))

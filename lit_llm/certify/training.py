"""Train a small model in the process of one rank: the job of most checks."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from lit_llm.callbacks import (
    BatchRamp,
    Cosine,
    ExpertBalance,
    GradientNorm,
    SpikeGuard,
    StepCheckpoint,
    StepSeed,
    ValidateEvery,
)
from lit_llm.callbacks._lightning import is_logged
from lit_llm.certify.watch import WATCHES, Watch
from lit_llm.checkpoint.disk_format import newest_good
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO, FolderCheckpointIO
from lit_llm.core._torch import compiled_graphs
from lit_llm.core.errors import UserError
from lit_llm.core.hardware import this_machine
from lit_llm.data import TextFiles
from lit_llm.distributed.block_kernels import float8_problem, no_compiler
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.optim import MuonAdamW
from lit_llm.tokenizers import Bytes
from lit_llm.training.language_model import LanguageModel

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"n_layer": 2, "n_head": 8, "n_embd": 64, "block_size": 32},
    "small": {"n_layer": 6, "n_head": 8, "n_embd": 256, "block_size": 128, "vocab_size": 2048},
    "experts": {"n_layer": 2, "n_head": 8, "n_embd": 64, "block_size": 32, "moe": MoEConfig(8, 2, 64, router="sigmoid")},
    "small-experts": {
        **{"n_layer": 4, "n_head": 8, "n_embd": 256, "block_size": 128, "vocab_size": 2048},
        **{"moe": MoEConfig(8, 2, 256, router="sigmoid")},
    },
    "gpt2-124m": {
        **{"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50257, "mlp": "gelu"},
        **{"norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False},
    },
}
LEARNING_RATE = 3e-3  # with a higher rate, AdamW amplifies rounding: a difference of 8e-6 after 9 steps becomes 1e-3 after 11


class Losses(Callback):
    """Callback that records loss and end time of every logged step, and kills the process by SIGKILL after step `kill_at`."""

    def __init__(self, kill_at: int | None) -> None:
        self.losses, self.ends = dict[int, float](), list[float]()
        self.kill_at = kill_at

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last = trainer.global_step  # not 0 if a run is continued

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step > self.last and is_logged(trainer, step):
            self.losses[step] = float(trainer.callback_metrics["train/loss"])
            self.ends.append(time.perf_counter())
        self.last = step
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path,
    *,
    ranks: int,
    accelerator: str = "cpu",
    strategy: str | dict[str, Any] = "auto",
    precision: str = "32-true",
    compile: bool = False,
    activation_checkpointing: Any = "none",
    optimizer: str = "AdamW",
    size: str = "tiny",
    micro_batch: int | None = None,
    batch: int = 8,
    steps: int = 20,
    log_every: int = 1,
    threads: int = 1,
    save: str | None = None,
    sharded: bool = False,
    background: bool = False,
    resume: str | None = None,
    kill_at: int | None = None,
    ramp: tuple[int, int] | None = None,
    watch: str | None = None,
) -> dict[str, Any]:
    """Train a model on the text that `write_text` has written.

    Return a dict: "losses" ({logged step: loss}), "step_seconds" (median), "graphs" and "graph_breaks" (numbers of compiled
    graphs and of graph breaks), and the figures of `watch`.

    Args:
        strategy: a strategy's name, or the arguments of MeshStrategy.
        size: the model, a key of SIZES.
        micro_batch: sequences of a micro-batch. None: half of a rank's batch, so that gradients are accumulated.
        batch: sequences of an optimizer step.
        save: folder for a checkpoint after every third step. None: no checkpoint.
        sharded: whether each rank writes a shard of a checkpoint.
        background: whether checkpoints are written in the background.
        resume: the folder whose newest undamaged checkpoint is continued. None: training starts at step 1.
        kill_at: the step after which each rank kills itself. None: never.
        ramp: (sequences of a batch at the start, sequences after which batches grow). With a ramp, the run also validates.
        watch: the measurement, a key of WATCHES. None: no measurement.

    Raises:
        UserError: The device does not support the settings.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device(accelerator)
    if problem := float8_problem(device) if precision == "float8" else no_compiler(device) if compile else None:
        raise UserError(problem)
    seed_everything(1, verbose=False)
    torch.set_num_threads(threads)
    if compile:
        torch.compiler.reset()
    graphs = compiled_graphs() if compile else (0, 0)
    config = GPTConfig(**SIZES[size])
    module = LanguageModel(
        config,
        MuonAdamW if optimizer == "Muon" else partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        LossConfig(),
        ComputeConfig(compile=compile, activation_checkpointing=activation_checkpointing, float8=precision == "float8"),
    )
    watcher = WATCHES[watch]() if watch else Watch()
    losses = Losses(kill_at)
    callbacks: list[Any] = [Cosine(warmup_steps=2, total_steps=20), GradientNorm(1.0), SpikeGuard(), StepSeed(3)]
    if config.moe is not None:
        callbacks.append(ExpertBalance())
    if save is not None:
        callbacks.append(StepCheckpoint(3, monitor=None, dirpath=str(folder / save), keep_last=9))
    if ramp is not None:
        pairs = [(0, ramp[0] * config.block_size), (ramp[1] * config.block_size, batch * config.block_size)]
        callbacks += [BatchRamp(pairs), ValidateEvery(2)]
    trainer = Trainer(
        accelerator=accelerator,
        devices=ranks,
        strategy=_strategy(strategy, sharded),
        precision="bf16-mixed" if precision == "float8" else precision,  # type: ignore[arg-type]
        max_steps=steps,
        logger=False,
        callbacks=[*callbacks, watcher, losses],
        enable_checkpointing=save is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0 if ramp is None else 1.0,
        log_every_n_steps=log_every,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    if micro_batch is None:
        chosen = trainer.strategy
        data_parallel = chosen.sizes(ranks).data_parallel if isinstance(chosen, MeshStrategy) else ranks
        micro_batch = max(1, batch // data_parallel // 2)
    trainer.strategy.checkpoint_io = AsyncFolderCheckpointIO() if background else FolderCheckpointIO()
    start = None if resume is None else newest_good(folder / resume)[0]
    if resume is not None and start is None:
        raise RuntimeError("no checkpoint was complete when the run was killed")
    with watcher:
        trainer.fit(module, datamodule=text_data(folder, config, micro_batch, batch), ckpt_path=start, weights_only=True)
    compilations = [after - before for before, after in zip(graphs, compiled_graphs() if compile else (0, 0), strict=True)]
    taken = sorted(b - a for a, b in zip(losses.ends[:-1], losses.ends[1:], strict=True))
    return {
        "losses": {str(step): value for step, value in losses.losses.items()},
        "step_seconds": taken[len(taken) // 2] if taken else None,
        "graphs": compilations[0],
        "graph_breaks": compilations[1],
        **watcher.figures,
    }


def write_text(folder: Path) -> None:
    """Write the text on which every job trains, unless the file exists: a changed file would be tokenised again."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("".join(f"line {i} of a text that repeats itself, {i * i} and {i % 7}\n" for i in range(2000)))


def text_data(folder: Path, config: GPTConfig, micro_batch: int, batch: int) -> TextFiles:
    """Return the DataModule of the text that `write_text` wrote, with bytes as tokens. Batch sizes are in sequences."""
    return TextFiles(
        paths=[str(folder / "text.txt")],
        cache_dir=str(folder / "cache"),
        tokenizer=Bytes(),
        micro_batch_size=micro_batch,
        global_batch_size=batch,
        block_size=config.block_size,
        val_fraction=0.02,
    )


def _strategy(strategy: str | dict[str, Any], sharded: bool) -> Any:
    if strategy == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True)
    if isinstance(strategy, str):
        return strategy
    chosen = MeshStrategy(**strategy)
    chosen.sharded_checkpoints = sharded
    return chosen


def gpu(folder: Path, *, ranks: int, accelerator: str) -> dict[str, Any]:
    """Return the name of this machine's GPU, and the GB/s that the plan assumes for links between the GPUs of a node."""
    return {"name": torch.cuda.get_device_name(), "node_gbps": this_machine(measure=False).node_gbps}

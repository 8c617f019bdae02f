"""Trains a tiny model once for each job, in one set of processes. Tests start it with `launch.run_ranks`.

    python layouts.py JOBS.json      one process per rank; reports the result of `train` for each job

A job is a dict of `train`'s arguments. All jobs share one set of processes, because imports take longer than
training.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy

from lit_llm.callbacks import EMA, Cosine, ExpertBalance, GradientNorm, SpikeGuard, StepCheckpoint, StepSeed
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO, FolderCheckpointIO
from lit_llm.data import TextFiles, TokenShards
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy, loss_scaling
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.lora import LoRAConfig
from lit_llm.models.loss import LossConfig
from lit_llm.optim import Lion, MuonAdamW
from lit_llm.tokenizers import Bytes
from lit_llm.training.distillation import Distillation
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.objective import Objective
from lit_llm.training.preference import Preference

TEXT = "".join(f"line {i} of a text that repeats itself, {i * i} and {i % 7}\n" for i in range(600))
SIZE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "modern": {},
    "gpt2": {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False},
    "llama": {"mlp": "swiglu", "n_kv_head": 2, "qk_norm": False, "window": 9},
    "olmo": {
        **{"norm_position": "post", "qk_norm_width": "projection", "attention_sinks": True, "attention_output_bias": True},
        "layers": {"window": [9, None], "rope": [True, False]},
    },
    "canon": {"qkv_convolution": 2, "input_convolution": 4, "exclusive_attention": True, "n_kv_head": 2},
    "gemma": {
        **{"norm_position": "sandwich", "norm_unit_offset": True, "attention_softcap": 5.0, "embedding_scale": 3.0},
        **{"mlp": "geglu", "logit_scale": 0.5},
    },
    "experts": {
        **{"n_layer": 3, "mlp": "swiglu", "mlp_bias": True},
        "moe": {
            **{"experts": 5, "top_k": 2, "expert_width": 24, "shared_experts": 1, "first_dense": 1, "router": "sigmoid"},
            **{"balance": 0.1, "sequence_balance": 0.05, "z_loss": 0.01},
        },
    },
    "deepseek": {
        **{"n_layer": 3, "mlp": "swiglu", "qk_norm": False, "zero_init_projections": False},
        "latent": {"kv_rank": 10, "query_rank": 12, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 5},
        "moe": {
            **{"experts": 8, "top_k": 2, "expert_width": 24, "shared_experts": 1, "first_dense": 1, "router": "sigmoid"},
            **{"groups": 4, "top_groups": 2, "scale": 2.5, "sequence_balance": 0.05},
        },
    },
    "neox": {
        **{"norm": "layernorm", "bias": True, "qk_norm": False, "mlp": "gelu", "gelu_approximate": "none"},
        **{"parallel_residual": True, "partial_rotary_factor": 0.25, "residual_scale": 0.7},
    },
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)),
    "AdamW-fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True),
    "MuonAdamW": MuonAdamW,
    "MuonAdamW-bfloat16": lambda groups: MuonAdamW(groups, ns_dtype="bfloat16"),
    "NorMuon": lambda groups: MuonAdamW(groups, momentum=0.9, normuon_beta2=0.95),
    "Lion": lambda groups: Lion(groups, lr=1e-3),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


def instantiate(class_path: str, groups: Any, init_args: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer as a recipe names it."""
    return instantiate_class((groups,), {"class_path": class_path, "init_args": init_args})


class Rows(Logger):
    """{step: {name: value}}."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.setdefault(step or 0, {}).update(metrics)


class TwoSources(TextFiles):
    """Text in which targets are ignored, and rows have one of two sources."""

    every_target_counts = False
    source_names = ("even", "odd")  # type: ignore[assignment]


class Ignoring(LanguageModel):
    """Ignores some targets, so that ranks and micro-batches have different token counts. Numbers the sources of rows."""

    def on_after_batch_transfer(self, batch: dict[str, torch.Tensor], dataloader_idx: int) -> dict[str, torch.Tensor]:
        left_out = (batch["input_ids"] % 5 == 0) | (batch["input_ids"][:, :1] % 2 == 0)  # (B, T)
        sources = batch["input_ids"][:, 1] % 2  # (B,)
        return {**batch, "targets": batch["targets"].masked_fill(left_out, -100), "sources": sources}


class OneTarget(Ignoring):
    """Ignores all targets of a micro-batch but one of its first row. Ranks with other positions have none."""

    place = 3

    def on_after_batch_transfer(self, batch: dict[str, torch.Tensor], dataloader_idx: int) -> dict[str, torch.Tensor]:
        targets = torch.full_like(batch["targets"], -100)  # (B, T)
        targets[0, self.place] = batch["targets"][0, self.place]
        return {**batch, "targets": targets, "sources": batch["input_ids"][:, 1] % 2}


class FirstOfChunk(OneTarget):
    """That target is the first of the second of four chunks: it is ahead of positions of another rank."""

    place = 8


class Tilt(Callback):
    """The first expert of a layer gets no token, and the second one all."""

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModel) -> None:  # type: ignore[override]
        for bias in pl_module.expert_biases or ():
            if bias is not None:
                bias[0], bias[1] = -9, 9


LEAVES_OUT: dict[str | bool, type[LanguageModel]] = {
    **{False: LanguageModel, True: Ignoring},
    **{"all but one": OneTarget, "all but the first of a chunk": FirstOfChunk},
}


def train(
    folder: Path,
    *,
    strategy: str | dict[str, Any] = "auto",
    ranks: int = 1,
    precision: str = "32-true",
    steps: int = 8,
    save_at: int | None = None,
    to: str | None = None,
    sharded: bool = False,
    background: bool = False,
    resume: str | None = None,
    model: str = "modern",
    optimizer: str = "AdamW",
    settings: dict[str, Any] | None = None,
    compute: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    micro_batch_size: int = 2,
    parameters: bool = False,
    ignoring: bool | str = False,
    packed: bool = False,
    accelerator: str = "cpu",
    architecture: dict[str, Any] | None = None,
    more: list[Any] | None = None,
    lora: dict[str, Any] | None = None,
    init_from: str | None = None,
    limit_train_batches: int | None = None,
    ema: float | None = None,
    balance: float | None = None,
    tilted: bool = False,
    val_fraction: float = 0.0225,
    validate: bool = True,
    pairs: dict[str, Any] | None = None,
    taught: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on `folder`/text.txt; lists by step of losses, norms, rates, and validation; with `parameters` also the final ones.

    Args:
        strategy: MeshStrategy's arguments, or a name that Lightning knows.
        save_at, to: save at this step (and the last) into the folder `to`; `sharded` by all ranks, in the `background`.
        settings, compute, loss, architecture: of GPTConfig, ComputeConfig, LossConfig and Architecture.
        ignoring: leave targets out (a key of `LEAVES_OUT`), and log the losses of two sources.
        packed: train on text.jsonl, whole documents in blocks of 31 tokens, which no number of ranks divides.
        lora, init_from: of LoRAConfig, and a checkpoint in `folder` with its base weights.
        limit_train_batches: of an epoch.
        ema: decay of an average of the weights.
        balance: rate of the biases of experts, whose values and counts are then in the result.
        tilted: the first expert of a layer gets no token, and the second one all.
        val_fraction: of the text, for validation: 22 blocks, which four ranks cannot share evenly.
        validate: after the training.
        pairs: train on the folder `folder`/pairs with a Preference of these arguments.
        taught: train on the folder `folder`/taught with a Distillation of these arguments.
        more: callbacks after the others.
    """
    seed_everything(1, verbose=False)
    data = (TwoSources if ignoring else TextFiles)(
        paths=[str(folder / ("text.jsonl" if packed else "text.txt"))],
        tokenizer=Bytes(),
        micro_batch_size=micro_batch_size,
        global_batch_size=8,
        packing="best_fit" if packed else "concatenate",
        val_fraction=val_fraction,
    )
    if pairs is not None:
        rest = {"micro_batch_size": micro_batch_size, "global_batch_size": 8, "packing": "best_fit"}
        data = TokenShards(path=str(folder / "pairs"), **rest)  # type: ignore[assignment]
        packed = True
    if taught is not None:
        rest = {"micro_batch_size": micro_batch_size, "global_batch_size": 8}
        data = TokenShards(path=str(folder / "taught"), **rest)  # type: ignore[assignment]
    size = {**SIZE, **MODELS[model]} if architecture is None else {"block_size": SIZE["block_size"]}
    config = GPTConfig(**{**size, "mask_documents": packed, **(settings or {})})
    data.block_size = 31 if packed and pairs is None else config.block_size
    objective: Objective | None = None if pairs is None else Preference(**pairs)
    objective = objective if taught is None else Distillation(**taught)
    module = LEAVES_OUT[ignoring](
        config,
        OPTIMIZERS[optimizer],
        LossConfig(**(loss or {})),
        ComputeConfig(**(compute or {})),
        architecture=None if architecture is None else Architecture(**architecture),
        lora=None if lora is None else LoRAConfig(**lora),
        init_from=None if init_from is None else folder / init_from,
        objective=objective,
    )
    guard = SpikeGuard()
    callbacks: list[Any] = [Cosine(warmup_steps=2, total_steps=20), GradientNorm(1.0), guard, StepSeed(3)]
    average = None if ema is None else EMA(ema)
    callbacks += [] if average is None else [average]
    callbacks += [] if balance is None else [ExpertBalance(balance)]
    callbacks += [Tilt()] if tilted else []
    if to is not None:
        callbacks.append(StepCheckpoint(save_at or steps, monitor=None, dirpath=str(folder / to), keep_last=9))
    callbacks += more or []
    chosen = MeshStrategy(**strategy) if isinstance(strategy, dict) else strategy
    if chosen == "ddp":
        chosen = DDPStrategy(gradient_as_bucket_view=True)
    if isinstance(chosen, MeshStrategy):
        chosen.sharded_checkpoints = sharded
    # Lightning refuses both for a MeshStrategy by their names.
    plugin = {"16-mixed": lambda: loss_scaling("cpu"), "64-true": DoublePrecision}.get(precision)
    trainer = Trainer(
        accelerator=accelerator,
        devices=ranks,
        strategy=chosen,
        precision=precision if plugin is None else None,  # type: ignore[arg-type]
        plugins=None if plugin is None else [plugin()],
        max_steps=steps,
        logger=Rows(),
        callbacks=callbacks,
        enable_checkpointing=to is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_train_batches=limit_train_batches,
        limit_val_batches=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.strategy.checkpoint_io = AsyncFolderCheckpointIO() if background else FolderCheckpointIO()
    trainer.fit(module, datamodule=data, ckpt_path=None if resume is None else folder / resume, weights_only=True)
    assert isinstance(trainer.logger, Rows)
    rows = {step: row for step, row in sorted(trainer.logger.rows.items()) if "train/loss" in row}
    result: dict[str, Any] = {name: [row[name] for row in rows.values()] for name in ("train/loss", "grad/norm", "lr")}
    if config.predict_ahead:
        result["train/loss_ahead"] = [row["train/loss_ahead"] for row in rows.values()]
    result["steps"], result["guard"] = list(rows), guard.state_dict()["losses"]
    if objective is not None:
        means = [f"train/{name}" for name in module.objective.means(config)]
        result["means"] = {name: [row[name] for row in rows.values()] for name in means}
    names = [f"{name}/loss" for name in data.source_names]
    result["sources"] = {f"train/{name}": [row.get(f"train/{name}", -1.0) for row in rows.values()] for name in names}
    assert module.model is not None
    result["bytes"] = sum(_local(p).numel() * p.element_size() for p in module.model.parameters())
    state = [
        value for held in trainer.optimizers[0].state.values() for value in held.values() if isinstance(value, torch.Tensor)
    ]
    result["state bytes"] = sum(_local(t).numel() * t.element_size() for t in state)
    if parameters:
        result["parameters"] = {n: _whole(p).detach().clone() for n, p in module.model.named_parameters()}
    if balance is not None:
        result["biases"] = [None if bias is None else bias.tolist() for bias in module.expert_biases or ()]
        result["load"] = [row["experts/load"] for row in rows.values()]
        result["means"] = {name: values.tolist() for name, values in module.router_means.items()}  # of the last step
        routers = module.whole_model.routers  # type: ignore[union-attr]
        result["shares"] = [None if router.shares.is_meta else router.shares.tolist() for router in routers]
    if average is not None:
        result["average"] = {name: _whole(t).double().norm().item() for name, t in average.by_name(module).items()}
    result["val/loss"] = None
    if validate:
        trainer.limit_val_batches, trainer.loggers = 1.0, []
        validated = trainer.validate(module, datamodule=data, verbose=False)[0]
        result["val/loss"] = validated["val/loss"]
        result["sources"] |= {f"val/{name}": [validated.get(f"val/{name}", -1.0)] for name in names}
    return result


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


if __name__ == "__main__":
    from launch import report

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    jobs: dict[str, dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    world = int(os.environ["WORLD_SIZE"])
    report(**{name: train(Path.cwd(), ranks=world, **job) for name, job in jobs.items()})

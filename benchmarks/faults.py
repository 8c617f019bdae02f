"""Faults to inject into a run: callbacks that break one thing each. They come before all others (`--trainer.callbacks+`)."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn


class Targets(Callback):
    """Training targets that are not the next inputs.

    Args:
        kind: unshifted, twice (shifted), shuffled (over the batch), ignored (nine of ten).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch["input_ids"], batch["targets"]
        generator = torch.Generator().manual_seed(batch_idx)
        if self.kind == "unshifted":
            targets.copy_(inputs)
        elif self.kind == "twice":
            targets[:, :-1] = targets[:, 1:].clone()
        elif self.kind == "shuffled":
            order = torch.randperm(targets.numel(), generator=generator)
            targets.copy_(targets.flatten()[order].view_as(targets))
        elif self.kind == "ignored":
            targets.masked_fill_(torch.rand(targets.shape, generator=generator) < 0.9, -100)
        else:
            raise ValueError(self.kind)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.kind == "ignored":
            trainer.datamodule.every_target_counts = False  # type: ignore[attr-defined]


class Batches(Callback):
    """Training batches that are not those of the data.

    Args:
        kind: repeated (the first one at every step), garbage (random ids in one step of twenty), slow (80 ms each).
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.first = kind, {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.kind == "repeated":
            at = batch_idx % trainer.accumulate_grad_batches
            first = self.first.setdefault(at, {name: value.clone() for name, value in batch.items()})
            for name, value in batch.items():
                value.copy_(first[name])
        elif self.kind == "garbage" and trainer.global_step % 20 == 14 and trainer.global_step > 30:
            ids = torch.randint(0, 256, batch["input_ids"].shape, generator=torch.Generator().manual_seed(batch_idx))
            batch["targets"].copy_(ids)
            batch["input_ids"][:, 1:] = ids[:, :-1]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.kind == "slow":
            loader = data.train_dataloader

            def slow() -> Any:
                found = loader()
                rows = found.dataset.rows
                found.dataset.rows = lambda blocks: (time.sleep(0.08), rows(blocks))[1]
                return found

            data.train_dataloader = slow


class OtherTokenizer(Callback):
    """Validation text whose ids are those of another vocabulary."""

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *args: Any) -> None:
        for name in ("input_ids", "targets"):
            batch[name].copy_(torch.where(batch[name] < 0, batch[name], (batch[name] * 7 + 131) % 256))


class SeesTheFuture(Callback):
    """Attention without a causal mask."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        def anywhere(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            kwargs.pop("is_causal", None)
            return original(query, key, value, *args, **kwargs)

        original = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = anywhere


class Weights(Callback):
    """Weights that are wrong when training starts.

    Args:
        kind: dead (most hidden units of each MLP are never above zero), frozen (the second block), large (outputs of the first
            MLP overflow fp16), rank (rank 1 has others), decayed (weight decay acts on vectors).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model: Any = pl_module.model
        blocks: nn.ModuleList = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        if self.kind == "decayed":
            for group in trainer.optimizers[0].param_groups:
                if any(p.ndim == 1 for p in group["params"]):
                    group["weight_decay"] = 0.1
        with torch.no_grad():
            for i, block in enumerate(blocks):
                linears = [module for name, module in block.named_modules() if isinstance(module, nn.Linear) and "mlp" in name]
                widest = max(linears, key=lambda module: module.out_features)
                if self.kind == "dead":
                    dead = int(0.8 * widest.out_features)
                    widest.weight[:dead] = 0
                    if widest.bias is not None:
                        widest.bias[:dead] = -20
                elif self.kind == "frozen" and i == 1:
                    block.requires_grad_(False)
                elif self.kind == "large" and i == 0:
                    widest.weight.mul_(1e6)
                elif self.kind == "rank" and trainer.global_rank == 1:
                    widest.weight.add_(0.02 * torch.randn_like(widest.weight))


class SumsMicroBatches(Callback):
    """A loss that is added over micro-batches instead of averaged."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        step = pl_module.training_step
        pl_module.training_step = lambda *args: step(*args) * trainer.accumulate_grad_batches  # type: ignore[method-assign]


class SlowRank(Callback):
    """Rank 1 needs 60 ms more for each forward pass."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        step = pl_module.training_step
        if trainer.global_rank == 1:
            pl_module.training_step = lambda *args: (time.sleep(0.06), step(*args))[1]  # type: ignore[method-assign]


class RestartedSchedule(Callback):
    """After a resume the schedule starts again."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        schedule: Any = next(c for c in trainer.callbacks if hasattr(c, "rate"))  # type: ignore[attr-defined]
        rate, first = schedule.rate, trainer.global_step
        schedule.rate = lambda step, peak: rate(step - first, peak)

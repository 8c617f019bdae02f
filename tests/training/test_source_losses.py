"""The loss of each source of a mixture, against sums over rows in float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.training.language_model import LanguageModel

NAMES = ["web", "code", "never drawn"]
VOCABULARY, LENGTH, BATCH = 23, 8, 8


class Rows(LightningDataModule):
    """24 rows of two sources. Step 2 of batches of eight has none of "code", and one row of "code" has no target."""

    vocab_size, eos_id, tokenizer, every_target_counts, source_names = VOCABULARY, None, None, False, NAMES

    def __init__(self, micro_batch_size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (3 * BATCH, LENGTH + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
        targets[1] = -100
        sources = torch.arange(3 * BATCH) % 2
        sources[BATCH : 2 * BATCH] = 0
        self.rows = [{"input_ids": i[:-1], "targets": t, "sources": s} for i, t, s in zip(ids, targets, sources, strict=True)]
        self.micro_batch_size = micro_batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=self.micro_batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=5)  # type: ignore[arg-type]  # the last batch has four rows

    test_dataloader = val_dataloader


class Record(Callback):
    """What was logged, and the weights that it is about, by optimizer step."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}
        self.weights: dict[int, Mapping[str, Tensor]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.weights[trainer.global_step + 1] = {k: v.clone() for k, v in pl_module.model.state_dict().items()}
        trainer.callback_metrics.clear()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.callback_metrics:
            self.logged[trainer.global_step] = {name: float(value) for name, value in trainer.callback_metrics.items()}


def quiet_trainer(**settings: Any) -> Trainer:
    return Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                   accelerator="cpu", num_sanity_val_steps=0, **settings)  # fmt: skip


def module(**settings: Any) -> LanguageModel:
    seed_everything(7)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=LENGTH, zero_init_projections=False)
    return LanguageModel(config, partial(torch.optim.SGD, lr=0.5), **settings)


def exact(model: GPT, rows: list[dict[str, Tensor]]) -> dict[str, float]:
    """Mean NLL of each source and of all, token by token in float64; nothing for a source without targets."""
    nll, count = defaultdict[str, float](float), defaultdict[str, int](int)
    for row in rows:
        z = model.double()(row["input_ids"][None])[0]
        for position, target in enumerate(row["targets"].tolist()):
            if target != -100:
                for name in (f"{NAMES[int(row['sources'])]}/loss", "loss"):
                    nll[name] += F.cross_entropy(z[position], torch.tensor(target)).item()
                    count[name] += 1
    return {name: nll[name] / count[name] for name in nll}


def rebuilt(weights: Mapping[str, Tensor]) -> GPT:
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=LENGTH, zero_init_projections=False, vocab_size=VOCABULARY)
    model = GPT(config)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize(("micro", "chunk_size"), [(8, None), (2, 5)], ids=["one micro-batch", "four, loss in chunks"])
def test_training_logs_the_mean_over_the_global_batch_of_each_source(micro: int, chunk_size: int | None) -> None:
    data, record = Rows(micro), Record()
    trainer = quiet_trainer(
        max_steps=3, accumulate_grad_batches=BATCH // micro, log_every_n_steps=1, limit_val_batches=0, callbacks=[record]
    )
    trainer.fit(module(loss=LossConfig(chunk_size=chunk_size)), datamodule=data)
    for step in (1, 2, 3):
        rows = data.rows[(step - 1) * BATCH : step * BATCH]
        expected = {f"train/{name}": loss for name, loss in exact(rebuilt(record.weights[step]), rows).items()}
        logged = {name: loss for name, loss in record.logged[step].items() if name.endswith("loss")}
        assert logged == pytest.approx(expected, rel=1e-6)
    assert "train/code/loss" in record.logged[1] and "train/code/loss" not in record.logged[2]  # left out, not NaN


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluation_logs_the_mean_over_all_tokens_of_each_source(command: str) -> None:
    data, model = Rows(8), module()
    found = getattr(quiet_trainer(), command)(model, datamodule=data, verbose=False)[0]
    prefix = {"validate": "val", "test": "test"}[command]
    expected = {f"{prefix}/{name}": loss for name, loss in exact(rebuilt(model.model.state_dict()), data.rows).items()}  # type: ignore[union-attr]
    assert {name: loss for name, loss in found.items() if name.endswith("loss")} == pytest.approx(expected, rel=1e-6)

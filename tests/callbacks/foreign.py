"""A LightningModule and a plain Trainer that are independent of lit_llm, to test the callbacks with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

VOCAB, LENGTH, BATCH = 11, 5, 2
IMPORTS = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[2])))  # PYTHONPATH of other processes


class Batches(Dataset):
    """Micro-batch i is a pure function of i, so the data of a resumed run depend only on where it begins."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + i))


class FromGlobalStep(Sampler):
    """Micro-batches of this rank in global order, beginning at the trainer's optimizer step."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        self.trainer, self.steps = trainer, steps

    def __len__(self) -> int:
        return self.steps * self.trainer.accumulate_grad_batches

    def __iter__(self):
        world, rank = self.trainer.world_size, self.trainer.global_rank
        for i in range(self.trainer.global_step * self.trainer.accumulate_grad_batches, len(self)):
            yield i * world + rank


class Foreign(LightningModule):
    """Predicts the next token from the current one. `seen`: (optimizer steps made before, loss) per micro-batch."""

    def __init__(self, steps: int = 8, lr: float = 0.1, seed: int = 0, val_losses: list[float] | None = None):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, 8)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(8, VOCAB)
        self.steps, self.lr, self.val_losses = steps, lr, val_losses
        self.seen: list[tuple[int, float]] = []
        self.validated: list[int] = []
        self.ends: list[int] = []

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.drop(self.embed(batch[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.seen.append((self.trainer.global_step, loss.item()))
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        value = self.loss(batch)
        if not self.trainer.sanity_checking and self.val_losses is not None:
            value = torch.tensor(self.val_losses[len(self.validated)])
        self.log("val/loss", value, sync_dist=self.trainer.world_size > 1)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def on_train_end(self) -> None:
        self.ends.append(self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [
                {"params": self.embed.parameters(), "lr": self.lr * 2, "name": "embedding"},
                {"params": self.head.parameters()},
            ],
            lr=self.lr,
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(10**6), batch_size=None, sampler=FromGlobalStep(self.trainer, self.steps))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Batches(2), batch_size=None)


class Rows(Logger):
    """Stores logged rows: {step: row}."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.setdefault(step, {}).update(metrics)


def make_trainer(callbacks: list, tmp_path: Path, *, steps: int = 8, every: int = 1, **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": Rows(),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in callbacks),
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return Trainer(
        max_steps=steps,
        max_epochs=-1,
        log_every_n_steps=every,
        callbacks=callbacks,
        default_root_dir=tmp_path,
        **{**defaults, **kwargs},
    )


def fit(callbacks: list, tmp_path: Path, *, module: Foreign | None = None, resume: Any = None, steps: int = 8, **kwargs):
    """One run; returns (trainer, module, {step: row})."""
    module = module or Foreign(steps=steps)
    trainer = make_trainer(callbacks, tmp_path, steps=steps, **kwargs)
    trainer.fit(module, ckpt_path=resume, weights_only=True if resume else None)
    rows = trainer.logger.rows if isinstance(trainer.logger, Rows) else {}
    return trainer, module, rows


def assert_same(a: Any, b: Any) -> None:
    """Two checkpoints' contents are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def run_ranks(script: str, tmp_path: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Run `script` in `ranks` gloo processes; each calls report(trainer, …). Returns the reports, as JSON, in rank order.

    In the script `OUT` is a shared folder and `WORLD` the number of processes. "stdout": what all of them printed.
    """
    import launch  # not at the top: scripts import this module without the tests' folder on their path

    reports = launch.run_ranks(
        "import json, launch, os, torch\n"
        "from pathlib import Path\n"
        "from foreign import *\n"
        f"OUT, WORLD = Path({str(tmp_path)!r}), {ranks}\n"
        "def report(trainer, **values):\n"
        "    launch.report(**json.loads(json.dumps(values)))\n"
        f"{script}\n",
        ranks,
        tmp_path,
    )
    printed = "".join((tmp_path / f"rank-{rank}.log").read_text() for rank in range(ranks))
    return [{**each, "stdout": printed} for each in reports]

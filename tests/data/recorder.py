"""Token shards in which every token is its own position, and a module that records its batches."""

from __future__ import annotations

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lit_llm.data.order import sample_index
from lit_llm.ingest.shards import ShardWriter

TOKENS = 203  # T = 8: M = (203 - 1) // 8 = 25 samples
T = 8


class Recorder(LightningModule):
    """Record the batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen, self.steps, self.validated = [], [], []

    def training_step(self, batch, _):
        self.seen.append(batch)
        self.steps.append(self.trainer.global_step)
        return self.weight.sum()

    def validation_step(self, batch, _):
        self.validated.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def write(folder, name, tokens, vocab_size=1000):
    with ShardWriter(folder, name, vocab_size=vocab_size, shard_tokens=64) as writer:
        writer.write(np.asarray(tokens))


def trainer(tmp_path, **arguments):
    defaults = {
        "default_root_dir": str(tmp_path),
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
    }
    return Trainer(**(defaults | arguments))


def fit(tmp_path, data, ckpt_path=None, callbacks=(), **arguments):
    module, run = Recorder(), trainer(tmp_path, callbacks=list(callbacks), **arguments)
    run.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return module, run


def sample_numbers(batches):
    """Which samples the batches hold; also checks that they are whole blocks of consecutive tokens."""
    found = []
    for batch in batches:
        assert batch["input_ids"].dtype == batch["targets"].dtype == torch.int64
        assert batch["input_ids"].is_contiguous()
        assert batch["targets"].is_contiguous()
        torch.testing.assert_close(batch["targets"], batch["input_ids"] + 1, rtol=0, atol=0)
        starts = batch["input_ids"][:, :1]
        torch.testing.assert_close(batch["input_ids"], starts + torch.arange(T), rtol=0, atol=0)
        assert torch.all(starts % T == 0)
        found += (starts // T).flatten().tolist()
    return found


def expected_samples(first, last, seed=3):
    return sample_index(np.arange(first, last), samples=25, seed=seed).tolist()


class SaveAt(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.path)

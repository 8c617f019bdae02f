"""Two processes train with a batch ramp; each records what it read and logged.

Run by test_ramped_order.py: ramp_script.py FOLDER, which holds the shards and the checkpoints of one process.
"""

import sys
from pathlib import Path

import torch
from launch import report
from lightning.pytorch import Callback, Trainer, seed_everything
from ramp_run import RAMP, Rows, weights
from recorder import T

from lit_llm.callbacks import BatchRamp, Cosine, GradientNorm, SpikeGuard, StepCheckpoint, StepSeed, Throughput, ValidateEvery
from lit_llm.data import TokenShards
from lit_llm.models.gpt import GPTConfig
from lit_llm.training.language_model import LanguageModel


class Samples(Callback):
    def __init__(self):
        self.steps = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.setdefault(trainer.global_step + 1, []).extend((batch["input_ids"][:, 0] // T).tolist())


def train(folder, name, ckpt_path=None):
    seed_everything(5)
    model = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=T, zero_init_projections=False)
    module = LanguageModel(model, lambda groups: torch.optim.AdamW(groups, lr=1e-2))
    rows, samples = Rows(), Samples()
    callbacks = [Cosine(warmup_steps=2), GradientNorm(), ValidateEvery(4), BatchRamp(RAMP), Throughput(), SpikeGuard()]
    trainer = Trainer(
        callbacks=[*callbacks, StepSeed(), StepCheckpoint(1, keep_last=20, monitor=None), rows, samples],
        accelerator="cpu", devices=2, strategy="ddp", max_steps=9, log_every_n_steps=1, num_sanity_val_steps=0, logger=False,
        default_root_dir=folder / name, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TokenShards(
        train=str(folder / "train_*.bin"), val=str(folder / "val_*.bin"), vocab_size=1000, block_size=T, global_batch_size=12,
        micro_batch_size=1, seed=3,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return trainer, module, rows.rows, samples.steps


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer, module, rows, samples = train(folder, "two")
    continued = train(folder, "continued", folder / "one" / "checkpoints" / "step-00000003.ckpt")[2]
    result = {"rows": rows, "samples": samples, "weights": weights(module), "continued": continued}
    report(**result)

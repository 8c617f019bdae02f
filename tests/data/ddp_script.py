"""Two processes train on token shards with a plain Trainer; each records the batches it read.

Run by test_ddp.py: ddp_script.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

from lit_llm.data import TokenShards


class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_rows, self.val_rows = [], []

    def training_step(self, batch, _):
        self.train_rows.append([self.trainer.global_step, batch["input_ids"][:, 0].tolist()])
        return self.weight.sum()

    def validation_step(self, batch, _):
        counted = self.all_gather((batch["targets"] != -100).sum())  # a collective in every batch: hangs if counts differ
        targets = batch["targets"]
        self.val_rows.append([int(counted.sum()), targets[targets != -100].tolist()])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    data = TokenShards(
        train=str(folder / "train_*.bin"),
        val=str(folder / "val_*.bin"),
        vocab_size=1000,
        block_size=8,
        global_batch_size=12,
        micro_batch_size=2,
        seed=3,
    )
    module = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=4,
        num_sanity_val_steps=0,
        val_check_interval=1.0,
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(folder / "end.ckpt")
    result = {"train": module.train_rows, "val": module.val_rows, "accumulate": trainer.accumulate_grad_batches}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))

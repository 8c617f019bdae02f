"""Two processes train on token shards with a plain Trainer; each records the batches it read.

Run by test_ddp.py: ddp_script.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
from launch import report
from lightning.pytorch import LightningModule, Trainer

from lit_llm.core.errors import UserError
from lit_llm.data import TokenShards


class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_rows, self.val_rows, self.seen_at_start = [], [], []

    def training_step(self, batch, _):
        self.train_rows.append([self.trainer.global_step, batch["input_ids"][:, 0].tolist()])
        return self.weight.sum()

    def validation_step(self, batch, _):
        counted = self.all_gather((batch["targets"] != -100).sum())  # a collective in every batch: hangs if counts differ
        targets = batch["targets"]
        self.val_rows.append([int(counted.sum()), targets[targets != -100].tolist()])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def watch_files(folder):
    """What this process does from now on with files in ``folder``, such as "open x.bin"."""
    seen = []

    def watched(name, call):
        def wrapper(path, *arguments, **options):
            if str(path).startswith(str(folder)):
                seen.append(f"{name} {os.path.relpath(path, folder)}")
            return call(path, *arguments, **options)

        return wrapper

    for name in ("open", "stat", "scandir", "listdir"):
        setattr(os, name, watched(name, getattr(os, name)))
    return seen


def refusal(trainer, **settings):
    """What `setup` says about other settings, in the same processes."""
    data = TokenShards(block_size=8, global_batch_size=12, **settings)
    data.trainer = trainer
    try:
        data.setup("fit")
    except UserError as error:
        return str(error)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    data = TokenShards(
        path=str(folder),
        block_size=8,
        global_batch_size=12,
        micro_batch_size=2,
        seed=3,
    )
    module = Recorder()
    seen = watch_files(folder)
    module.on_train_start = lambda: module.seen_at_start.extend(seen)
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
    result |= {
        "seen_at_start": module.seen_at_start,
        "fingerprint": data.opened.fingerprint(),
        "files": data.state_dict()["files"],
        "eos_id": data.eos_id,
        "text": data.tokenizer and data.tokenizer.decode([72, 105]),
    }
    seen.clear()
    missing = {"train": f"{folder}/gone_*.bin", "val": f"{folder}/val_*.bin"}
    result["refusals"] = [refusal(trainer, **missing), refusal(trainer, path=str(folder), vocab_size=100)]
    result["seen_when_refused"] = list(seen)
    report(**result)

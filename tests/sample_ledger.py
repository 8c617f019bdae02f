"""A record of the samples that a run trains on, that tests compare."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from run_comparison import FINISHED, LEDGER, STARTED


class SampleLedger(Callback):
    """Writes a checksum of every sample's ids, by optimizer step, to `samples-rank<r>.jsonl` in the run folder."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = Path(trainer.default_root_dir) / LEDGER.format(trainer.global_rank)
        self.file = open(path, "a")  # noqa: SIM115  # closed in on_train_end
        self._write(STARTED)  # later lines replace those of the same step by an earlier process

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._write(trainer.global_step + 1, *(zlib.crc32(sample.tobytes()) for sample in batch["input_ids"].cpu().numpy()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(FINISHED)
        self.file.close()

    def _write(self, step: int, *checksums: int) -> None:
        self.file.write(json.dumps([step, *checksums]) + "\n")
        self.file.flush()  # so that a kill loses no line

"""A record of the samples that a run trains on, for `verify-resume`."""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_llm.runs.comparison import FINISHED, LEDGER, STARTED

_SECONDS_TO_KILL = 60.0


class SampleLedger(Callback):
    """Writes a checksum of every sample's ids, by optimizer step, to `samples-rank<r>.jsonl` in the run folder.

    Args:
        stop_after: optimizer steps after which the run ends; null = the end of the recipe.
        terminate_in: the optimizer step, 1, 2, …, at whose start rank 0 sends SIGTERM to itself; null = never.
        wait_at_end: at the end of training, rank 0 waits up to a minute to be killed.
    """

    def __init__(self, stop_after: int | None = None, terminate_in: int | None = None, wait_at_end: bool = False) -> None:
        self.stop_after, self.terminate_in, self.wait_at_end = stop_after, terminate_in, wait_at_end
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = Path(trainer.default_root_dir) / LEDGER.format(trainer.global_rank)
        self.file = open(path, "a")  # noqa: SIM115  # closed in on_train_end
        self._write(STARTED)  # later lines replace those of the same step by an earlier process
        self._stop(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        self._write(step, *(zlib.crc32(sample.tobytes()) for sample in batch["input_ids"].cpu().numpy()))
        if step != self.step and step == self.terminate_in and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(FINISHED)
        self.file.close()
        if self.wait_at_end and trainer.is_global_zero:
            time.sleep(_SECONDS_TO_KILL)

    def _write(self, step: int, *checksums: int) -> None:
        self.file.write(json.dumps([step, *checksums]) + "\n")
        self.file.flush()  # so that a kill loses no line

    def _stop(self, trainer: Trainer) -> None:
        if self.stop_after is not None and trainer.global_step >= self.stop_after:
            trainer.should_stop = True

"""Script of test_histogram_ranks.py: runs with and without histograms, on several layouts.

python histogram_script.py JOBS.json     one process per rank; reports the whole tensors of each layout, for the test to count
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import layouts
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from lit_llm.callbacks import Histograms


class Whole(Callback):
    """Adds a logger for TensorBoard, and keeps whole parameters and gradients, before Histograms sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[str, int, torch.Tensor]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            trainer.loggers = [*trainer.loggers, TensorBoardLogger(self.folder, name="", version="")]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step + 1
        for name, parameter in pl_module.named_parameters() if step in (1, 3) else ():
            for tag, tensor in (("weights", parameter), ("gradients", parameter.grad)):
                self.seen.append((f"{tag}/{name}", step, layouts._whole(tensor.detach()).clone()))


def compare(folder: Path, name: str, **job: Any) -> dict[str, Any]:
    """What was counted, and whether it computes the same without histograms."""
    whole = Whole(folder / f"events of {name}")
    counted = layouts.train(folder, steps=3, parameters=True, validate=False, more=[whole, Histograms(every_n_steps=3)], **job)
    without = layouts.train(folder, steps=3, parameters=True, validate=False, **job)
    same = counted["train/loss"] == without["train/loss"]
    for parameter, value in without["parameters"].items():
        same = same and torch.equal(value, counted["parameters"][parameter])
    return {"seen": whole.seen, "same": same}


if __name__ == "__main__":
    from launch import report

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world = int(os.environ["WORLD_SIZE"])
    jobs = json.loads(Path(sys.argv[1]).read_text())
    report(**{name: compare(Path.cwd(), name, ranks=world, **job) for name, job in jobs.items()})

"""Runs with and without a callback, on several layouts. For tests of health, of histograms and of scores of tasks on ranks.

python callback_script.py KIND JOBS.json     one process per rank; reports for each job what `compare` returns
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

from lit_llm.callbacks import EMA, HealthSignals, Histograms, TaskScores


class KeptHealth(HealthSignals):
    """Keeps its rows, as each rank has them."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        row = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("health/")}
        if row and (trainer.global_step == 1 or trainer.global_step % 2 == 0):
            self.rows[trainer.global_step] = row


class Differing(KeptHealth):
    """Changes the head of rank 1 before the first step."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        if trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.model.head.weight.mul_(1.25)


class KeptScores(TaskScores):
    """Keeps its rows, as each rank has them."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        row = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("task/")}
        if row:
            self.rows[trainer.global_step] = row


class Whole(Callback):
    """Adds a logger for TensorBoard, and keeps whole parameters and gradients, before Histograms sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[tuple[str, int, torch.Tensor]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            trainer.loggers = [*trainer.loggers, TensorBoardLogger(self.folder, name="", version="")]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step + 1
        for name, parameter in pl_module.named_parameters() if step in (1, 3) else ():
            for tag, tensor in (("weights", parameter), ("gradients", parameter.grad)):
                self.rows.append((f"{tag}/{name}", step, layouts._whole(tensor.detach()).clone()))


def compare(
    folder: Path, kind: str, name: str = "", *, differ: bool = False, averages: bool = False, **job: Any
) -> dict[str, Any]:
    """The rows that the callback kept, and whether the run computes the same without it.

    Args:
        differ: rank 1 begins with another head.
        averages: of the weights, whose scores are then logged.
    """
    job = {"steps": 4, "parameters": True, "validate": False} | job
    added: list[Callback] = []
    if kind == "health":
        job["val_fraction"] = 0.1  # on the text that it leaves the norms in bf16 stay within the test's tolerance
        added = [(Differing if differ else KeptHealth)(every_n_steps=2)]
    elif kind == "scores":
        added = [KeptScores([str(folder / "quiz.jsonl")], every_n_steps=2, batch_size=3)]
    else:
        added = [Whole(folder / f"events of {name}"), Histograms(every_n_steps=3)]
    before: list[Callback] = [EMA(0.9)] if averages else []
    watched = layouts.train(folder, more=[*before, *added], **job)
    without = layouts.train(folder, more=[EMA(0.9)] if averages else [], **job)
    same = watched["train/loss"] == without["train/loss"]
    for parameter, value in without["parameters"].items():
        same = same and torch.equal(value, watched["parameters"][parameter])
    return {"rows": added[0].rows, "same": same, "parameters": len(without["parameters"])}  # type: ignore[attr-defined]


if __name__ == "__main__":
    from launch import report

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    kind, jobs, world = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(os.environ["WORLD_SIZE"])
    report(**{name: compare(Path.cwd(), kind, name, ranks=world, **job) for name, job in jobs.items()})

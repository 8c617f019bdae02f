"""Script of test_task_scores_ranks.py: runs with and without the scores of tasks, on several layouts.

python task_scores_script.py JOBS.json     one process per rank; reports for each layout both runs, and the scores
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

from lit_llm.callbacks import EMA, TaskScores


class Kept(TaskScores):
    """Keeps its rows, as each rank has them."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        row = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("task/")}
        if row:
            self.rows[trainer.global_step] = row


def averaging(averages: bool) -> list[Any]:
    return [EMA(0.9)] if averages else []


def compare(folder: Path, *, averages: bool = False, **job: Any) -> dict[str, Any]:
    """The scores of a run, and whether it computes the same without them; of an average of the weights, if it has one."""
    tasks = Kept([str(folder / "quiz.jsonl")], every_n_steps=2, batch_size=3)
    with_scores = layouts.train(folder, steps=4, parameters=True, validate=False, more=[*averaging(averages), tasks], **job)
    without = layouts.train(folder, steps=4, parameters=True, validate=False, more=averaging(averages), **job)
    same = with_scores["train/loss"] == without["train/loss"]
    for name, value in without["parameters"].items():
        same = same and torch.equal(value, with_scores["parameters"][name])
    return {"rows": tasks.rows, "same": same, "parameters": len(without["parameters"])}


if __name__ == "__main__":
    from launch import report

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world = int(os.environ["WORLD_SIZE"])
    jobs = json.loads(Path(sys.argv[1]).read_text())
    report(**{name: compare(Path.cwd(), ranks=world, **job) for name, job in jobs.items()})

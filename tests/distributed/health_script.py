"""Script of test_health_ranks.py: runs with and without signals of health, on several layouts.

python health_script.py JOBS.json     one process per rank; reports for each layout both runs, and the signals
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

from lit_llm.callbacks import HealthSignals


class Kept(HealthSignals):
    """Keeps its rows, as each rank has them."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        row = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("health/")}
        if row and (trainer.global_step == 1 or trainer.global_step % 2 == 0):
            self.rows[trainer.global_step] = row


class Differing(Kept):
    """Changes the head of rank 1 before the first step."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        if trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.model.head.weight.mul_(1.25)


def compare(folder: Path, *, differ: bool = False, **job: Any) -> dict[str, Any]:
    """The signals of a run, and whether it computes the same without them."""
    health = (Differing if differ else Kept)(every_n_steps=2)
    # On the text that val_fraction leaves the norms in bf16 stay within the test's tolerance.
    job |= {"steps": 4, "parameters": True, "val_fraction": 0.1, "validate": False}
    with_health = layouts.train(folder, more=[health], **job)
    without = layouts.train(folder, **job)
    same = with_health["train/loss"] == without["train/loss"]
    for name, value in without["parameters"].items():
        same = same and torch.equal(value, with_health["parameters"][name])
    return {"rows": health.rows, "same": same, "parameters": len(without["parameters"])}


if __name__ == "__main__":
    from launch import report

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world = int(os.environ["WORLD_SIZE"])
    jobs = json.loads(Path(sys.argv[1]).read_text())
    report(**{name: compare(Path.cwd(), ranks=world, **job) for name, job in jobs.items()})

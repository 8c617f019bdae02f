"""The callback that applies the rules of `doctor` during training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.callbacks import MetricsFile
from lit_llm.core.errors import UserError
from lit_llm.core.number_text import counted
from lit_llm.reporting.doctor.diagnose import RULES, examine, observed
from lit_llm.runs.loaded_run import LoadedRun

FIRST_CHECK = 20  # optimizer steps
GROWTH = 1.2  # factor between the steps of two checks
SHARE = 0.001  # share of the run's time that checks may take, besides the last one
USUAL = 0.02  # assumed seconds of the first check


class Doctor(Callback):
    """Applies the rules of `doctor` to the rows of metrics.jsonl during training, and prints one line for each new finding.

    The callback checks at step 20, then each time that the number of steps has grown by a fifth, and at the end. A check is
    delayed if all checks together would take more than a thousandth of the training time. Findings that follow from another
    finding are not printed. At the end, the callback prints the number of rules whose curves the run has logged. The files of
    the training data are not compared with their hashes.

    Contract:
        on_train_start: finds metrics.jsonl among the Trainer's loggers; without a MetricsFile the callback does nothing.
        on_train_batch_end, on_train_end: reads and prints, on rank 0.
        State: none. A resumed run prints its findings again.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._next = FIRST_CHECK
        self._said: set[str] = set()
        self._began = self._spent = 0.0
        self._longest = USUAL

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = next((logger.path for logger in trainer.loggers if isinstance(logger, MetricsFile)), None)
        self._folder = path.parent if path is not None and trainer.is_global_zero else None
        self._next, self._said = max(FIRST_CHECK, int(trainer.global_step * GROWTH)), set()
        self._began, self._spent = time.perf_counter(), 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._folder is None or trainer.global_step < self._next:
            return
        if self._spent + self._longest <= SHARE * (time.perf_counter() - self._began):
            self._next = int(trainer.global_step * GROWTH) + 1
            self._check(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.save()  # the last row
        unjudged = self._check(pl_module)
        if unjudged:
            said = counted(len(self._said), "finding") if self._said else "no finding"
            judged = f"{len(RULES) - len(unjudged)} of {len(RULES)} rules"
            pl_module.print(f"doctor: {said} by {judged}; `doctor --run` names the others, which had nothing to judge by.")

    def _check(self, pl_module: LightningModule) -> list[str]:
        """Apply the rules and print new findings. Return the names of the rules whose curves the run lacks."""
        if self._folder is None:
            return []
        began = time.perf_counter()
        try:
            findings, unjudged = examine(observed(LoadedRun(self._folder, of_lit_llm=False)))
        except (UserError, OSError):  # no row yet, or a disk that fails: the loggers report it
            return []
        except Exception as error:  # a mistake of ours must not end the training
            folder, self._folder = self._folder, None
            rank_zero_warn(f"doctor is off: {type(error).__name__}: {error} (python -m lit_llm doctor --run {folder})")
            return []
        for finding in findings:
            if finding.name not in self._said and not finding.follows_from:
                self._said.add(finding.name)
                pl_module.print(f"doctor: {finding.name}: {finding.seen}. Change: {finding.rule.change}.")
        taken = time.perf_counter() - began
        self._spent, self._longest = self._spent + taken, max(taken, self._longest)
        return [name for names in unjudged.values() for name in names]

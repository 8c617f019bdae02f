"""`doctor` while a run is going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lit_llm.callbacks import MetricsFile
from lit_llm.core.errors import UserError
from lit_llm.reporting.doctor.diagnose import diagnose, observed
from lit_llm.runs.loaded_run import LoadedRun

FIRST_CHECK = 20  # optimizer steps
GROWTH = 1.2  # of the steps between two checks


class Doctor(Callback):
    """Applies the rules of `doctor` to the rows of metrics.jsonl, and prints one line for each finding, once.

    It reads the file at step 20, at steps that are a fifth further on each time, and at the end: some 60 times in a million
    steps. Findings that follow from another one are not printed. The files of the training data are not compared.

    Contract:
        on_train_start: finds the file among the Trainer's loggers; without a MetricsFile the callback does nothing.
        on_train_batch_end, on_train_end: reads and prints, on rank 0.
        State: none. A resumed run prints its findings again.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._next = FIRST_CHECK
        self._said: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._folder = next((logger.path.parent for logger in trainer.loggers if isinstance(logger, MetricsFile)), None)
        self._next, self._said = max(FIRST_CHECK, int(trainer.global_step * GROWTH)), set()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step >= self._next:
            self._next = int(trainer.global_step * GROWTH) + 1
            self._check(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.save()  # the last row
        self._check(pl_module)

    @rank_zero_only
    def _check(self, pl_module: LightningModule) -> None:
        if self._folder is None:
            return
        try:
            findings = diagnose(observed(LoadedRun(self._folder, of_lit_llm=False)))
        except (UserError, OSError):  # no row yet, or a disk that fails: the loggers report it
            return
        except Exception as error:  # a mistake of ours must not end the training
            rank_zero_warn(f"doctor is off: {type(error).__name__}: {error} (python -m lit_llm doctor --run {self._folder})")
            self._folder = None
            return
        for finding in findings:
            if finding.name not in self._said and not finding.follows_from:
                self._said.add(finding.name)
                pl_module.print(f"doctor: {finding.name}: {finding.seen}. Change: {finding.rule.change}.")

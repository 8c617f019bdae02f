"""`doctor` while a run is going on."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lit_llm.callbacks import MetricsFile
from lit_llm.core.disk import open_ordinary
from lit_llm.core.errors import UserError
from lit_llm.core.number_text import counted
from lit_llm.reporting.doctor.diagnose import RULES, examine, first_steps
from lit_llm.reporting.doctor.observed import Observed
from lit_llm.runs.loaded_run import LoadedRun, by_step
from lit_llm.runs.metrics_rows import MetricsRows

FIRST_CHECK = 20  # optimizer steps
GROWTH = 1.2  # of the steps between two checks
SHARE = 0.001  # of the run's time that checks may take, besides the last one
USUAL = 0.02  # seconds of a check, until one was made
MOST_ROWS = 200  # of each of two kinds: a check reads at most twice as many


class Doctor(Callback):
    """Applies the rules of `doctor` to the rows of metrics.jsonl, and prints one line for each finding, once.

    It does so from step 20 on, at steps that are a fifth further on each time, where its checks have taken less than a
    thousandth of the time so far; and at the end. A check reads at most some hundred rows, evenly thinned. Findings that follow
    from another one are not printed. At the end it names the rules that had nothing to judge by. The files of the training data
    are not compared.

    Contract:
        on_train_start: finds the file among the Trainer's loggers; without a MetricsFile the callback does nothing.
        on_train_batch_end, on_train_end: reads and prints, on rank 0.
        State: none. A resumed run prints its findings again.
    """

    def __init__(self) -> None:
        self._rows: ThinnedRows | None = None
        self._next = FIRST_CHECK
        self._said: set[str] = set()
        self._began = self._spent = 0.0
        self._longest = USUAL

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = next((logger.path for logger in trainer.loggers if isinstance(logger, MetricsFile)), None)
        self._rows = ThinnedRows(path) if path is not None and trainer.is_global_zero else None
        self._next, self._said = max(FIRST_CHECK, int(trainer.global_step * GROWTH)), set()
        self._began, self._spent = time.perf_counter(), 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._rows is None or trainer.global_step < self._next:
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
            pl_module.print(f"doctor: {said} by {judged}. The others had nothing to judge by: {', '.join(unjudged)}.")

    @rank_zero_only
    def _check(self, pl_module: LightningModule) -> list[str]:
        """Print what is new. Returns the names of the rules that had nothing to judge by."""
        if self._rows is None:
            return []
        began = time.perf_counter()
        try:
            findings, unjudged = examine(self._rows.observed())
        except (UserError, OSError):  # no row yet, or a disk that fails: the loggers report it
            return []
        except Exception as error:  # a mistake of ours must not end the training
            folder, self._rows = self._rows.path.parent, None
            rank_zero_warn(f"doctor is off: {type(error).__name__}: {error} (python -m lit_llm doctor --run {folder})")
            return []
        for finding in findings:
            if finding.name not in self._said and not finding.follows_from:
                self._said.add(finding.name)
                pl_module.print(f"doctor: {finding.name}: {finding.seen}. Change: {finding.rule.change}.")
        taken = time.perf_counter() - began
        self._spent, self._longest = self._spent + taken, max(taken, self._longest)
        return [name for names in unjudged.values() for name in names]


class ThinnedRows:
    """Some rows of a metrics.jsonl that grows: every n-th of those with signals or validations, every m-th of the others.

    Args:
        path: of the file, which may be missing as yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._of: Observed | None = None
        self._file = self._read = 0  # its number, and bytes read of it
        self._kept: tuple[_Kept, _Kept] = (_Kept(), _Kept())

    def observed(self) -> Observed:
        """The run, by the rows so far."""
        with open(open_ordinary(self.path), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._read:  # another file: a resumed run removes later rows
                self._file, self._read, self._kept = status.st_ino, 0, (_Kept(), _Kept())
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._kept[b'"health/' in line or b'"val/' in line].add(self._read, line)
                self._read += len(line)
        rows = sorted({row for kept in self._kept for row in (*kept.rows, *kept.last)})
        columns = MetricsRows(self.path, io.BytesIO(b"".join(line for _, line in rows))).columns
        if self._of is None:
            run = LoadedRun(self.path.parent, of_lit_llm=False)
            self._of = Observed({}, run.config, first_steps(run))
        return Observed({tag: by_step(*column) for tag, column in columns.items()}, self._of.config, self._of.first_steps)


class _Kept:
    """(place in the file, line) of evenly thinned lines of a kind, and the last one."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, bytes]] = []
        self.last: list[tuple[int, bytes]] = []
        self._count, self._each = 0, 1

    def add(self, place: int, line: bytes) -> None:
        self.last = [(place, line)]
        if self._count % self._each == 0:
            self.rows += self.last
        self._count += 1
        if len(self.rows) > MOST_ROWS:
            self.rows, self._each = self.rows[::2], 2 * self._each

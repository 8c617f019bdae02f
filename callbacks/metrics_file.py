"""A logger that writes one file of JSON lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from .files import complete_file, set_aside

_NOT_METRICS = ("step", "time")


class MetricsFile(Logger):
    """Writes every logged number into one file, a JSON object on each line, beside the Trainer's other loggers.

    A line is like `{"step": 20, "time": 1732400000.1, "train/loss": 3.2}`: the keys are the names of the metrics, and `time`
    is when the first value of the line was logged, in seconds since 1970. JSON has no NaN: values that are not finite
    are the strings "NaN", "Infinity" and "-Infinity". Values that are not numbers, and metrics named step or time, are
    left out.

    The values of one step are one line. The line is written with one call when a value of another step is logged, or when the
    Trainer saves or finalizes its loggers. So a step can have several lines; if they repeat a name, the later value counts.
    After a kill the last line may be incomplete: the next launch cuts off this line.

    Only rank 0 writes. Nothing is read from the device if the values are numbers, as Lightning passes them.

    Args:
        path: path of the file. A missing folder is created.
        resume_step: the optimizer step from which training is resumed, -1 for a new run. Rows of later steps are removed from
            the file when the first row is written, because they are logged again. None: every row is kept, but the file of an
            earlier run is renamed to `<name>.1` (or 2, 3, …), with a warning, when a Trainer begins without a checkpoint.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        super().__init__()
        self.path, self.resume_step = Path(path), resume_step
        self._step = 0
        self._row: dict[str, Any] = {}  # the values of `_step` that are not written yet
        self._time = 0.0  # of the first of them
        self._begun = False  # rows of an earlier launch have been removed
        self._at_start: Trainer | None = None  # a Trainer that begins at step 0
        self._whole = True  # the file ends with a complete line

    @property
    def name(self) -> str:
        """Empty, because a logger's name is part of Lightning's default folder for checkpoints, `<save_dir>/checkpoints`."""
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the file has metrics only."""

    def log_graph(self, model: LightningModule, input_array: Any = None) -> None:  # type: ignore[override]
        """Writes no graph. Lightning calls this when a Trainer begins. Stores whether the Trainer trains from step 0."""
        trainer = model.trainer
        self._at_start = trainer if trainer.state.fn == TrainerFn.FITTING and trainer.global_step == 0 else None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        step = self._step if step is None else int(step)
        try:
            if step != self._step:
                self._write()
        finally:  # if the earlier row could not be written, it is lost, and this one is not
            if step != self._step:
                self._step, self._row = step, {}
            if not self._row:
                self._time = time.time()
            for name, value in metrics.items():
                number = _number(value)
                if number is not None and name not in _NOT_METRICS:
                    self._row[name] = number

    @rank_zero_only
    def save(self) -> None:
        self._write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._write()

    def _write(self) -> None:
        if not self._row:
            return
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Some strategies restore a checkpoint, and so set ckpt_path, after `log_graph`.
            if self.resume_step is None and self._at_start is not None and self._at_start.ckpt_path is None:
                self._set_aside()
            _keep_rows(self.path, math.inf if self.resume_step is None else self.resume_step)
            self._begun = True
        line = json.dumps({"step": self._step, "time": round(self._time, 3), **self._row}) + "\n"
        # Opened for each line, so that a deleted or replaced file is noticed. After an error the file may end within a line.
        repair, self._whole = not self._whole, False
        with open(self.path, "ab", buffering=2**20) as file:  # one call writes the line when the file is closed
            if repair:
                file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
            file.write(line.encode())
        self._whole, self._row = True, {}

    def _set_aside(self) -> None:
        """If the file has rows of an earlier run, rename this file, with a warning."""
        if self.path.exists() and self.path.stat().st_size:
            old = set_aside(self.path)
            rank_zero_warn(
                f"{self.path} had rows of an earlier run, which are now in {old}: this run begins at step 0 (MetricsFile)."
            )


def _number(value: Any) -> int | float | str | None:
    """A metric's value for the JSON file: a number, or a string such as "NaN". None if the value is not a number."""
    if isinstance(value, str | bytes):
        return None
    if isinstance(value, int):
        return int(value)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    if math.isnan(number):
        return "NaN"
    return number if math.isfinite(number) else "Infinity" if number > 0 else "-Infinity"


def _keep_rows(path: Path, step: float) -> None:
    """Remove the rows of steps after `step`, and lines that are not rows. Replaces the file atomically."""
    if not path.exists():
        return
    with complete_file(path, path.with_name(f".{path.name}.partial")) as kept, open(path, "rb") as old:
        kept.writelines(line for line in old if _is_row_until(line, step))


def _is_row_until(line: bytes, step: float) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    whole = line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    return whole and row["step"] <= step

"""Reading metrics.jsonl, the file of `callbacks.MetricsFile`, and the file of Lightning's CSVLogger. No torch."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lit_llm.core.disk import naming, open_ordinary
from lit_llm.core.errors import library_errors

_MOST_BYTES = 2**30  # a row has about 1 kB: a million logged steps
_MOST_OF_A_ROW = 2**24
_NOT_FINITE = {"NaN", "Infinity", "-Infinity"}
_LAST_STEP = 2**53  # larger whole numbers are no steps, and a float cannot hold them


class Value(NamedTuple):
    """A logged number."""

    step: int
    value: float
    time: float


class Column(NamedTuple):
    """The values of a tag. Three lists, as a run may have millions."""

    steps: list[int]
    values: list[float]
    times: list[float]


class MetricsRows:
    """The rows of a file.

    Args:
        content: is read in place of the file, if it is given.

    Attributes:
        columns: by tag, in the order of the file.
        unread: what could not be read, as sentences.
    """

    def __init__(self, path: Path, content: BinaryIO | None = None) -> None:
        self.columns: dict[str, Column] = {}
        self.unread: list[str] = []
        if content is not None:
            return self._read(path, content)
        try:
            with open(open_ordinary(path), "rb") as file:
                if (size := os.fstat(file.fileno()).st_size) > _MOST_BYTES:
                    raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {_MOST_BYTES:,}")
                self._read(path, file)
        except OSError as error:
            self.unread.append(f"{path.name} cannot be read ({error.strerror}): its rows are missing")

    def _read(self, path: Path, file: BinaryIO) -> None:
        number, whole, bad, back = 0, True, list[int](), ""
        for line in iter(lambda: file.readline(_MOST_OF_A_ROW), b""):
            number += whole  # else it is the rest of a line that is too long
            whole = line.endswith(b"\n")
            step, time, found = (_row(line) if whole else None) or (0, 0.0, {})
            if not found and bad[-1:] != [number]:
                bad.append(number)
            for tag, value in found.items():
                if (column := self.columns.get(tag)) is None:
                    column = self.columns[tag] = Column([], [], [])
                if not back and column.steps and step < column.steps[-1]:
                    back = f"line {number:,} goes back from step {column.steps[-1]:,} to {step:,}"
                column.steps.append(step)
                column.values.append(value)
                column.times.append(time)
        cut = not whole
        if cut:
            bad.pop()
        if bad:
            many = f"{len(bad):,} of {number - cut:,} lines are no rows, the first is line {bad[0]:,}"
            self.unread.append(f"{path.name}: {many}: they are left out")
        if back:
            self.unread.append(f"{path.name}: {back}, as if two runs had written it: of a step in both, the later row counts")
        if cut:
            self.unread.append(f"{path.name} ends within line {number:,}: that row is left out")


def _row(line: bytes) -> tuple[int, float, dict[str, float]] | None:
    """Step, time and numbers by tag of a line; None if it is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    step, time = row.pop("step", None), _number(row.pop("time", None))
    if type(step) is not int or not 0 <= step < _LAST_STEP or time is None or not math.isfinite(time):
        return None
    numbers = ((tag, value if type(value) is float else _number(value)) for tag, value in row.items())
    return step, time, {tag: number for tag, number in numbers if number is not None}


def csv_values(path: Path) -> dict[str, list[Value]]:
    """The numbers of a CSVLogger's file by column, without times. Rows without a step and other cells are left out."""
    values: dict[str, list[Value]] = {}
    with naming(path), library_errors(f"{path} is not CSV"), open(open_ordinary(path), newline="", errors="replace") as file:
        for row in csv.DictReader(file):
            step = (row.pop("step", None) or "").partition(".")[0]
            if not step.isdigit():
                continue
            for tag, cell in row.items():
                try:
                    value = Value(int(step), float(cell), 0.0)
                except (TypeError, ValueError):  # an empty cell, or more cells than columns
                    continue
                if value.step < _LAST_STEP:
                    values.setdefault(tag, []).append(value)
    return values


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return float(value) if value in _NOT_FINITE else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None

"""Reads metrics.jsonl, the file of `callbacks.MetricsFile`, and metrics.csv of Lightning's CSVLogger. Imports no torch."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any, BinaryIO

from lit_llm.core.disk import naming
from lit_llm.core.errors import library_errors

_NOT_FINITE = {"NaN", "Infinity", "-Infinity"}
_LAST_STEP = 2**53  # larger whole numbers are no steps, and a float cannot hold them

Column = tuple[list[int], list[float], list[float]]
"""(steps, values, times in seconds since 1970) of a metric: three lists of equal length, because runs have millions of rows."""


class MetricsRows:
    """The rows of the file metrics.jsonl at `path`.

    Attributes:
        columns: name of a metric (tag) → its steps, values and times, in the order of the file.
        unread: one sentence for each problem in reading the file.
    """

    def __init__(self, path: Path) -> None:
        self.columns: dict[str, Column] = {}
        self.unread: list[str] = []
        try:
            with open(path, "rb") as file:
                self._read(path, file)
        except OSError as error:
            self.unread.append(f"{path.name} cannot be read ({error.strerror}): its rows are missing")

    def _read(self, path: Path, file: BinaryIO) -> None:
        number, whole, bad = 0, True, list[int]()
        for number, line in enumerate(file, 1):
            whole = line.endswith(b"\n")
            step, time, values = (_row(line) if whole else None) or (0, 0.0, {})
            if whole and not values:
                bad.append(number)
            for tag, value in values.items():
                if (column := self.columns.get(tag)) is None:
                    column = self.columns[tag] = ([], [], [])
                column[0].append(step)
                column[1].append(value)
                column[2].append(time)
        if bad:
            many = f"{len(bad):,} of {number - (not whole):,} lines are no rows, the first is line {bad[0]:,}"
            self.unread.append(f"{path.name}: {many}: they are left out")
        if not whole:
            self.unread.append(f"{path.name} ends within line {number:,}: that row is left out")


def _row(line: bytes) -> tuple[int, float, dict[str, float]] | None:
    """(step, time in seconds since 1970, tag → number) of a line of metrics.jsonl; None if the line is not a valid row."""
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


def csv_values(path: Path) -> dict[str, Column]:
    """Column of a CSVLogger file → (steps, values, times). Times are 0: the file has none. Rows without step are skipped."""
    columns: dict[str, Column] = {}
    with naming(path), library_errors(f"{path} is not CSV"), open(path, newline="", errors="replace") as file:
        for row in csv.DictReader(file):
            step = (row.pop("step", None) or "").partition(".")[0]
            if not step.isdigit():
                continue
            for tag, cell in row.items():
                try:
                    number, value = int(step), float(cell)
                except (TypeError, ValueError):  # an empty cell, or more cells than columns
                    continue
                if number < _LAST_STEP:
                    steps, values, times = columns.setdefault(tag, ([], [], []))
                    steps.append(number)
                    values.append(value)
                    times.append(0.0)
    return columns


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return float(value) if value in _NOT_FINITE else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None

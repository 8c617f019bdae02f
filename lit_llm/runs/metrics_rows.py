"""Reading metrics.jsonl, the file of `callbacks.MetricsFile`, and the file of Lightning's CSVLogger. No torch."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
from collections.abc import Iterator
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


class MetricsRows:
    """The rows of a file.

    Attributes:
        values: by tag, in the order of the file.
        unread: what could not be read, as sentences.
    """

    def __init__(self, path: Path) -> None:
        self.values: dict[str, list[Value]] = {}
        self.unread: list[str] = []
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
            found = list(_values(line)) if whole else []
            if not found and bad[-1:] != [number]:
                bad.append(number)
            for tag, value in found:
                earlier = self.values.setdefault(tag, [])
                if earlier and value.step < earlier[-1].step and not back:
                    back = f"line {number:,} goes back from step {earlier[-1].step:,} to {value.step:,}"
                earlier.append(value)
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


def _values(line: bytes) -> Iterator[tuple[str, Value]]:
    """The numbers of a line by tag; none if it is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return
    if not isinstance(row, dict):
        return
    step, time = row.pop("step", None), _number(row.pop("time", None))
    if type(step) is not int or not 0 <= step < _LAST_STEP or time is None or not math.isfinite(time):
        return
    for tag, value in row.items():
        number = _number(value)
        if number is not None:
            yield tag, Value(step, number, time)


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

"""A run as a file that can be sent to somebody: rows and settings, without text, weights, names and paths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lit_llm.core.disk import open_ordinary
from lit_llm.core.errors import UserError
from lit_llm.reporting.doctor.observed import Observed
from lit_llm.runs.loaded_run import Series

_WORD = re.compile(r"[\w-]{1,40}")
"""Texts that are kept, such as a precision or a kind of norm, and the names of classes. Paths and prompts are not."""
_LEFT_OUT = {"run_dir", "trainer.logger", "samples"}


def write_case(path: Path, run: Observed, findings: list[str]) -> None:
    """Write the run and the names of what was found.

    Raises:
        UserError: The file exists, or cannot be written.
    """
    rows = {tag: [list(series.steps), list(series.values)] for tag, series in run.scalars.items()}
    case = {"findings": findings, "first_steps": list(run.first_steps), "config": _plain(run.config), "rows": rows}
    try:
        with open(path, "x") as file:
            json.dump(case, file)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror} (--report)") from None


def read_case(path: Path) -> Observed:
    """The run of such a file.

    Raises:
        UserError: It is none.
    """
    try:
        with open(open_ordinary(path)) as file:
            case = json.load(file)
        rows = {tag: Series(steps, values, [0.0] * len(steps)) for tag, (steps, values) in case["rows"].items()}
        return Observed(rows, case["config"], case["first_steps"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is neither a run folder nor a file of `doctor --report` (--run)") from None


def _plain(value: Any, key: str = "") -> Any:
    """Settings with null for every text that is not a single word."""
    if isinstance(value, dict):
        inner = {name: f"{key}.{name}" if key else str(name) for name in value}
        return {name: _plain(each, inner[name]) for name, each in value.items() if inner[name] not in _LEFT_OUT}
    if isinstance(value, list):
        return [_plain(each, key) for each in value]
    return value if not isinstance(value, str) or key.endswith("class_path") or _WORD.fullmatch(value) else None

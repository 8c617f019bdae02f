"""Write and read a case file: a run's logged rows and settings, without text, weights, names and paths, to send to others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lit_llm.core.disk import read_json
from lit_llm.core.errors import UserError
from lit_llm.reporting.doctor.observed import Observed
from lit_llm.runs.loaded_run import Series

_KEPT = {"precision", "strategy", "loss", "norm", "norm_position", "mlp", "position", "router", "packing", "ns_method"}
"""Last parts of the keys of settings whose text stays in a case file. Names of classes stay, too."""
_LEFT_OUT = {"run_dir", "trainer.logger", "samples", "data.init_args.sources"}
_KEY = re.compile(r"[a-z_0-9]{1,40}")
_OURS = ("lit_llm.", "torch.", "lightning.")


def case_text(run: Observed, findings: list[str]) -> str:
    """Return the JSON text of a case file: the run's rows and settings, and `findings`, the names of findings about the run."""
    rows = {
        tag: [list(series.steps), list(series.values)]
        for tag, series in run.scalars.items()
        if tag.startswith("health/") or tag.count("/") < 2  # a third part may be the name of a data source
    }
    case = {"findings": findings, "first_steps": list(run.first_steps), "config": _plain(run.config), "rows": rows}
    return json.dumps(case, default=lambda value: None)


def read_case(path: Path) -> Observed:
    """Return the run that the case file `path` describes.

    Raises:
        UserError: The file is no case file.
    """
    try:
        case = read_json(path)
        rows = {
            tag: Series([int(step) for step in steps], [float(value) for value in values], [0.0] * len(steps))
            for tag, (steps, values) in case["rows"].items()
            if len(steps) == len(values)
        }
        return Observed(rows, dict(case["config"]), [int(step) for step in case["first_steps"]])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise UserError(f"{path} is neither a run folder nor a file of `doctor --report` (--run)") from None


def _plain(value: Any, key: str = "") -> Any:
    """Return a setting's value without private content: keys in `_LEFT_OUT` are removed, and texts become None, except texts of
    settings in `_KEPT` and names of classes of lit_llm, torch or Lightning. `key`: the dotted key of `value`.
    """
    if isinstance(value, dict):
        inner = {str(name): f"{key}.{name}" if key else str(name) for name in value if _KEY.fullmatch(str(name))}
        return {name: _plain(value[name], path) for name, path in inner.items() if path not in _LEFT_OUT}
    if isinstance(value, list):
        return [_plain(each, key) for each in value]
    if not isinstance(value, str):
        return value
    last = key.rpartition(".")[2]
    return value if last in _KEPT or (last == "class_path" and value.startswith(_OURS)) else None

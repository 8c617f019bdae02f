"""plan.json of a run folder: what was planned and what was measured, one entry for each launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lit_llm.core.disk import read_json
from lit_llm.core.errors import UserError
from lit_llm.runs.run_folder import CONFIG

PLAN = "plan.json"
_FORMAT = 1
_KEPT = 50
"""Launches that a file keeps, the newest."""


def as_text(launches: list[dict[str, Any]]) -> str:
    """The content of plan.json."""
    return json.dumps({"format": _FORMAT, "launches": launches}, indent=2, default=str) + "\n"


def recorded_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The launches in plan.json, oldest first. A file that cannot be read has none."""
    try:
        return _launches(run_dir)
    except UserError:
        return []


def earlier_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The newest launches in plan.json that measured something."""
    return [launch for launch in recorded_launches(run_dir) if _has_measured(launch)][-_KEPT + 1 :]


def _has_measured(launch: dict[str, Any]) -> bool:
    return launch["measured"].get("step_seconds") is not None


def measured_launch(run: Path) -> dict[str, Any]:
    """The newest launch of a run that measured a step.

    Raises:
        UserError: There is no such run, or its plan.json is missing, damaged, or without a measured step.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: it has no {CONFIG} (--from_run)")
    if not (run / PLAN).is_file():
        raise UserError(
            f"{run} has no {PLAN}: it ran with --plan null, or the planner does not support it; "
            "train it again for a few logged steps (--from_run)"
        )
    found = next(filter(_has_measured, reversed(_launches(run))), None)
    if found is None:
        raise UserError(
            f"{run} has measured no step: it needs two logged steps with --throughput; train it longer, or set "
            "--trainer.log_every_n_steps lower (--from_run)"
        )
    return found


def _launches(run_dir: Path) -> list[dict[str, Any]]:
    """All launches in plan.json.

    Raises:
        UserError: It is missing, or not what `as_text` writes.
    """
    path = run_dir / PLAN
    try:
        content = read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror} (--from_run)") from None
    except ValueError:
        raise UserError(
            f"{path} is damaged: it is not JSON; train the run again for a few logged steps, or restore the file (--from_run)"
        ) from None
    launches = content.get("launches") if isinstance(content, dict) and content.get("format") == _FORMAT else None
    if not isinstance(launches, list) or not all(
        isinstance(each, dict) and isinstance(each.get("measured"), dict) for each in launches
    ):
        raise UserError(f"{path} is not of format {_FORMAT}: train the run again for a few logged steps (--from_run)")
    return launches

"""plan.json of a run folder, with one entry for each launch: the plan and the measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lit_llm.core.disk import read_json

PLAN = "plan.json"
_KEPT = 50
"""Number of launches that the file keeps: the newest ones."""


def as_text(launches: list[dict[str, Any]]) -> str:
    """The content of plan.json for these launches, as JSON."""
    return json.dumps({"format": 1, "launches": launches}, indent=2, default=str) + "\n"


def recorded_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The launches in plan.json, oldest first; an empty list if the file is missing or damaged."""
    try:
        return [launch for launch in read_json(run_dir / PLAN)["launches"] if isinstance(launch["measured"], dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def measured_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The launches in plan.json that measured a step, oldest first: the newest `_KEPT` - 1, so that one more can be added."""
    measured = [each for each in recorded_launches(run_dir) if each["measured"].get("step_seconds") is not None]
    return measured[-_KEPT + 1 :]

"""plan.json of a run folder. Its list has a dict for each launch of `fit`: what was planned, and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lit_llm.core.disk import read_json

PLAN = "plan.json"
_KEPT = 50
"""Largest number of launches in plan.json. Older launches are dropped."""


def as_text(launches: list[dict[str, Any]]) -> str:
    """The content of plan.json, JSON text, for `launches`: a dict for each launch of `fit`, oldest first."""
    return json.dumps({"format": 1, "launches": launches}, indent=2, default=str) + "\n"


def recorded_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The dicts of the launches of `fit` in a run's plan.json, oldest first; [] if the file is missing or damaged."""
    try:
        return [launch for launch in read_json(run_dir / PLAN)["launches"] if isinstance(launch["measured"], dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def measured_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The newest `_KEPT` - 1 launches in a run's plan.json with a measured step time, oldest first. One more can be added."""
    measured = [each for each in recorded_launches(run_dir) if each["measured"].get("step_seconds") is not None]
    return measured[-_KEPT + 1 :]

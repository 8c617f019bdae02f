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
    """The text of a plan.json that has these launches, as JSON."""
    return json.dumps({"format": 1, "launches": launches}, indent=2, default=str) + "\n"


def recorded_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The launches in plan.json, oldest first; an empty list if the file is missing or damaged."""
    try:
        return [launch for launch in read_json(run_dir / PLAN)["launches"] if isinstance(launch["measured"], dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def measured_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The launches in plan.json with a measured step time, oldest first; at most `_KEPT` - 1, so that one more can be added."""
    measured = [each for each in recorded_launches(run_dir) if each["measured"].get("step_seconds") is not None]
    return measured[-_KEPT + 1 :]

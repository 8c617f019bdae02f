"""Names that a recipe gives to Lightning's Trainer: strategy, accelerator, profiler."""

from __future__ import annotations

import difflib
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry


def name_problems(trainer: Namespace) -> list[str]:
    """One sentence for each name that the Trainer does not know, with the most similar one."""
    known = {
        "strategy": ["auto", *StrategyRegistry.available_strategies()],
        "accelerator": ["auto", "gpu", *AcceleratorRegistry.available_accelerators()],
        "profiler": ["simple", "advanced", "pytorch", "xla"],
        "gradient_clip_algorithm": ["norm", "value"],
    }
    problems = [_problem(key, trainer.get(key), names) for key, names in known.items()]
    return [problem for problem in problems if problem is not None]


def _problem(key: str, value: Any, names: list[str]) -> str | None:
    if not isinstance(value, str) or value in names:
        return None
    if "." in value and not value.lstrip().startswith("{"):
        return f"trainer.{key} is {value!r}, but a class is written as a dict (--trainer.{key} '{{class_path: {value}}}')"
    near = difflib.get_close_matches(value.lower(), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known names: {', '.join(name for name in names if '_' not in name)}"
    return f"trainer.{key} is {value[:60]!r}, which is not known{hint} (--trainer.{key})"

"""How often to save: Young's rule, and what saving and losing work cost together. Times in seconds."""

from __future__ import annotations

import math


def young_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Best time between two checkpoints: √(2 · T_save · MTBF) (Young 1974)."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def overhead_fraction(save_seconds: float, interval_seconds: float, mtbf_seconds: float) -> float:
    """Share of the time lost: T_save/interval to saving, interval/(2 · MTBF) to work that a failure undoes."""
    return save_seconds / interval_seconds + interval_seconds / (2 * mtbf_seconds)


def cluster_mtbf_hours(device_mtbf_hours: float, devices: int) -> float:
    """Mean time between failures of a run that any device's failure stops."""
    return device_mtbf_hours / devices

"""The best checkpoint interval (Young's rule) and the time lost to saving and to failures. Times in seconds."""

from __future__ import annotations

import math


def young_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Best interval between two checkpoints: √(2 · T_save · MTBF) (Young 1974)."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def overhead_fraction(save_seconds: float, interval_seconds: float, mtbf_seconds: float) -> float:
    """Fraction of time lost: T_save/interval to saving, plus interval/(2 · MTBF) to redoing work after failures."""
    return save_seconds / interval_seconds + interval_seconds / (2 * mtbf_seconds)


def cluster_mtbf_hours(device_mtbf_hours: float, devices: int) -> float:
    """Mean time between failures of a run that stops when any device fails."""
    return device_mtbf_hours / devices

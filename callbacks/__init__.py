"""Lightning callbacks for pretraining, and a logger, one concern a file.

This folder can be copied into another project, under any name: it imports only torch, lightning, numpy and itself, and
lm_eval where one of its tasks is named. The docstring of a callback lists what it logs and what it does in each hook. The
x-axis of every row is the number of optimizer steps made. Rows are written at step 1 and at multiples of
`Trainer(log_every_n_steps)`.
"""

# ruff: noqa: F401 - __all__ is made from _FILES

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch_ramp import BatchRamp
    from .checkpoint import StepCheckpoint
    from .ddp_bucket_warmup import DDPBucketWarmup
    from .ema import EMA
    from .gradient_noise import GradientNoise
    from .gradient_norm_and_clipping import GradientNorm
    from .health import HealthSignals
    from .histograms import Histograms
    from .logger_errors import LoggerErrors
    from .metrics_file import MetricsFile
    from .profile_steps import Profile
    from .progress_bar import TrainingProgress
    from .samples import TextSamples
    from .schedule import WSD, Constant, Cosine, Decay, InverseSquareRoot, Linear, Schedule
    from .spike_guard import SpikeGuard
    from .step_seed import StepSeed
    from .stop_on_signal import StopOnSignal, ignore_signals
    from .stragglers import Stragglers
    from .task_scores import TaskScores
    from .tensorboard_page import TensorBoardPage
    from .throughput import Throughput
    from .time_breakdown import TimeBreakdown
    from .validation import ValidateEvery

_FILES = {
    "EMA": "ema",
    "WSD": "schedule",
    "BatchRamp": "batch_ramp",
    "Constant": "schedule",
    "Cosine": "schedule",
    "DDPBucketWarmup": "ddp_bucket_warmup",
    "Decay": "schedule",
    "GradientNoise": "gradient_noise",
    "GradientNorm": "gradient_norm_and_clipping",
    "HealthSignals": "health",
    "Histograms": "histograms",
    "InverseSquareRoot": "schedule",
    "Linear": "schedule",
    "LoggerErrors": "logger_errors",
    "MetricsFile": "metrics_file",
    "Profile": "profile_steps",
    "Schedule": "schedule",
    "SpikeGuard": "spike_guard",
    "StepCheckpoint": "checkpoint",
    "StepSeed": "step_seed",
    "StopOnSignal": "stop_on_signal",
    "Stragglers": "stragglers",
    "TaskScores": "task_scores",
    "TensorBoardPage": "tensorboard_page",
    "TextSamples": "samples",
    "Throughput": "throughput",
    "TimeBreakdown": "time_breakdown",
    "TrainingProgress": "progress_bar",
    "ValidateEvery": "validation",
    "ignore_signals": "stop_on_signal",
}
__all__ = [*_FILES]


def __getattr__(name: str) -> Any:
    """Import all callbacks when the first one is used, so that modules without torch, such as `ranges`, come without it."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update({each: getattr(import_module(f".{file}", __name__), each) for each, file in _FILES.items()})
    return globals()[name]

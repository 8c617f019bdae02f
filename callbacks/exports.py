"""The public names of the folder."""

from .batch_ramp import BatchRamp
from .checkpoint import StepCheckpoint
from .ddp_bucket_warmup import DDPBucketWarmup
from .ema import EMA
from .expert_balance import ExpertBalance
from .gradient_noise import GradientNoise
from .gradient_norm_and_clipping import GradientNorm
from .health import HealthSignals
from .histograms import Histograms
from .learning_rate_schedules import WSD, Constant, Cosine, Decay, InverseSquareRoot, Linear, Schedule
from .logger_errors import LoggerErrors
from .metrics_file import MetricsFile
from .profile_steps import Profile
from .progress_bar import TrainingProgress
from .samples import TextSamples
from .spike_guard import SpikeGuard
from .step_seed import StepSeed
from .stop_on_signal import StopOnSignal, ignore_signals
from .stragglers import Stragglers
from .task_scores import TaskScores
from .tensorboard_setup import TensorBoardPage
from .throughput import Throughput
from .time_breakdown import TimeBreakdown
from .validation import ValidateEvery

__all__ = [
    "EMA",
    "WSD",
    "BatchRamp",
    "Constant",
    "Cosine",
    "DDPBucketWarmup",
    "Decay",
    "ExpertBalance",
    "GradientNoise",
    "GradientNorm",
    "HealthSignals",
    "Histograms",
    "InverseSquareRoot",
    "Linear",
    "LoggerErrors",
    "MetricsFile",
    "Profile",
    "Schedule",
    "SpikeGuard",
    "StepCheckpoint",
    "StepSeed",
    "StopOnSignal",
    "Stragglers",
    "TaskScores",
    "TensorBoardPage",
    "TextSamples",
    "Throughput",
    "TimeBreakdown",
    "TrainingProgress",
    "ValidateEvery",
    "ignore_signals",
]

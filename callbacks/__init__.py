"""Lightning callbacks for pretraining, one concern a file.

Each file imports torch, lightning and the standard library, nothing of this project: copy one into another project and
it works. What a callback logs, and what it does in which hook, is in its docstring. The x-axis of every row is the
number of optimizer steps made; rows are written at step 1 and at multiples of `Trainer(log_every_n_steps)`.
"""

from callbacks.batch_ramp import BatchRamp
from callbacks.checkpoint import StepCheckpoint
from callbacks.counter_seed import CounterSeed
from callbacks.ddp_buckets import SettledBuckets
from callbacks.gradient_norm import GradientNorm
from callbacks.profile import Profile
from callbacks.progress_bar import TrainingProgress
from callbacks.samples import TextSamples
from callbacks.schedule import WSD, Constant, Cosine, Decay, InverseSquareRoot, Linear, Schedule
from callbacks.spike_guard import SpikeGuard
from callbacks.stop_on_signal import StopOnSignal, ignore_signals
from callbacks.stragglers import Stragglers
from callbacks.tensorboard_page import TensorBoardPage
from callbacks.throughput import Throughput
from callbacks.time_breakdown import TimeBreakdown
from callbacks.validation import ValidateEvery

__all__ = [
    "WSD",
    "BatchRamp",
    "Constant",
    "Cosine",
    "CounterSeed",
    "Decay",
    "GradientNorm",
    "InverseSquareRoot",
    "Linear",
    "Profile",
    "Schedule",
    "SettledBuckets",
    "SpikeGuard",
    "StepCheckpoint",
    "StopOnSignal",
    "Stragglers",
    "TensorBoardPage",
    "TextSamples",
    "Throughput",
    "TimeBreakdown",
    "TrainingProgress",
    "ValidateEvery",
    "ignore_signals",
]

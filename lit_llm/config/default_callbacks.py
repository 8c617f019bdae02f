"""The callbacks of a run: one group of a recipe each, with the default class and arguments, and those that every run has.

No torch, until a run's callbacks are put together. `lit_llm.training.fit` adds those that need what only a launch knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_llm import callbacks

if TYPE_CHECKING:
    from lightning.pytorch import Callback


@dataclass(frozen=True)
class ClassGroup:
    """A group that names a class and its arguments.

    Attributes:
        base: class path of the base class.
        default: the class path used when a recipe does not name a class. None: the group is off.
        arguments: defaults that differ from those of the default class.
        package: where short class names are looked up.
    """

    base: str
    default: str | None = None
    arguments: dict[str, Any] | None = None
    package: str = "lit_llm.callbacks"

    @property
    def value(self) -> dict[str, Any] | None:
        """The default as a recipe would write it."""
        if self.default is None:
            return None
        return {"class_path": self.default, **({"init_args": self.arguments} if self.arguments else {})}


def _callback(name: str, default: str | None = None, **arguments: Any) -> ClassGroup:
    return ClassGroup(f"lit_llm.callbacks.{name}", default and f"lit_llm.callbacks.{default}", arguments or None)


CALLBACKS: dict[str, ClassGroup] = {
    "schedule": _callback("Schedule", "Cosine"),
    "batch_ramp": _callback("BatchRamp"),
    "health": _callback("HealthSignals", "HealthSignals"),  # sees gradients before they are clipped
    "histograms": _callback("Histograms"),  # likewise
    "gradient_norm": _callback("GradientNorm", "GradientNorm"),
    "gradient_noise": _callback("GradientNoise"),
    "ema": _callback("EMA"),
    "validation": _callback("ValidateEvery", "ValidateEvery", every_n_steps=1000),
    "throughput": _callback("Throughput", "Throughput"),
    "plan": ClassGroup(
        "lit_llm.training.plan_monitor.PlanMonitor",
        "lit_llm.training.plan_monitor.PlanMonitor",
        package="lit_llm.training.plan_monitor",
    ),
    "time_breakdown": _callback("TimeBreakdown"),
    "stragglers": _callback("Stragglers", "Stragglers"),
    "doctor": ClassGroup(
        "lit_llm.reporting.doctor.watch.Doctor",
        "lit_llm.reporting.doctor.watch.Doctor",
        package="lit_llm.reporting.doctor.watch",
    ),
    "profile": _callback("Profile"),
    "samples": _callback("TextSamples"),
    "tasks": _callback("TaskScores"),
    "page": _callback("TensorBoardPage", "TensorBoardPage"),
    "progress": _callback("TrainingProgress", "TrainingProgress"),
    "spike_guard": _callback("SpikeGuard", "SpikeGuard"),
    "signals": _callback("StopOnSignal", "StopOnSignal"),
    "checkpoint": _callback("StepCheckpoint", "StepCheckpoint"),
}
"""Groups that become callbacks. A group that is null is left out of the run."""


def all_callbacks(
    own: list[Callback], groups: list[Callback], *, save: Callback | None, fits: bool, seed: int | bool, progress_bar: bool
) -> list[Callback]:
    """The callbacks of a run, in the order in which they are called.

    Args:
        own: those of trainer.callbacks.
        groups: those of the groups.
        save: writes the run folder.
        fits: the run trains. Otherwise only what shows or scores takes part.
    """
    chosen = [each for each in groups if progress_bar or not isinstance(each, callbacks.TrainingProgress)]
    if not fits:
        return [*own, *(c for c in chosen if isinstance(c, callbacks.TrainingProgress | callbacks.TaskScores))]
    last = [callbacks.StepSeed(int(seed)), callbacks.DDPBucketWarmup(), *([save] if save else [])]
    return [callbacks.LoggerErrors(), *own, *chosen, *last]

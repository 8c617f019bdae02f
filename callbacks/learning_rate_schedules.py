"""Learning-rate schedules: pure functions of the update number, and callbacks that only apply them.

The rate depends on the step only, so no state is saved. A resumed, extended or branched run computes the same rate as
one that never stopped.

Notation: `t` = 1, 2, … is the number of the update, `peak` the largest rate, `final` the rate at the end. Warmup is
peak·t/warmup_steps. It does not start from a rate of 0, which would waste the first update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from ._lightning import is_logged, write_row
from .errors import UserError, setting, without
from .ranges import STEPS, Domain, at_least, check_ranges, whole

DecayShape = Literal["linear", "cosine", "one_minus_sqrt", "exponential"]


def wsd(
    t: int,
    *,
    peak: float,
    final: float,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int | None = None,
    shape: DecayShape,
) -> float:
    """The rate of update t: warmup, then `peak`, then a decay to `final` over the last `decay_steps` (Hu et al. 2024).

    Without `decay_steps`, the rate decays in all steps after warmup; with shape "cosine", this is the schedule of Loshchilov &
    Hutter 2017. :func:`decayed` defines the shapes.
    """
    if t <= warmup_steps:
        return peak * t / warmup_steps
    if t >= total_steps:
        return final
    decay_start = warmup_steps if decay_steps is None else total_steps - decay_steps
    if t <= decay_start:
        return peak
    return decayed((t - decay_start) / (total_steps - decay_start), peak=peak, final=final, shape=shape)


def decayed(x: float, *, peak: float, final: float, shape: DecayShape) -> float:
    """The learning rate after a fraction x > 0 of the steps of a decay from `peak`; `final` for x ≥ 1.

    linear: peak + (final − peak)·x; cosine: final + ½(peak − final)(1 + cos πx);
    one_minus_sqrt: final + (peak − final)(1 − √x); exponential: peak·(final/peak)^x.
    """
    if x >= 1 or peak == final:  # a group whose rate is 0 stays at 0
        return final
    if shape == "linear":
        return peak + (final - peak) * x
    if shape == "cosine":
        return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * x))
    if shape == "one_minus_sqrt":
        return final + (peak - final) * (1 - math.sqrt(x))
    assert shape == "exponential", shape
    return peak * (final / peak) ** x


def _refuse_endless(schedule: type, shape: DecayShape, final_ratio: float) -> None:
    if shape == "exponential" and final_ratio == 0:
        raise UserError(f"An exponential decay never reaches 0: set {setting(schedule, 'final_ratio')} above 0.")


def rate_curves(groups: list[dict[str, Any]], peaks: list[float]) -> dict[str, int]:
    """Metric → index of the group whose rate it shows: `lr` → 0; `lr/NAME` → i for each group i whose peak is not group 0's."""
    others = (i for i, peak in enumerate(peaks) if peak != peaks[0])
    return {"lr": 0} | {f"lr/{groups[i].get('name', i)}": i for i in others}


class Schedule(Callback, ABC):
    """Base class: sets the learning rate of every parameter group at every update. The group's configured rate is its peak.

    Logs: `lr` (first parameter group) and `lr/<name>` for each further group whose peak differs from the first group's
    (name = `group["name"]`, else the group's index).

    Contract:
        on_fit_start: stores the peaks, before a restored checkpoint overwrites the groups' rates. The peak of a group that is
            added later, as Lightning's BaseFinetuning does, is the group's rate when it is added.
        on_train_start: warns if the checkpoint's rate differs from the rate of this schedule at the checkpoint's step.
        on_train_batch_start: sets the rates of the next update, once per optimizer step.
        on_before_optimizer_step: writes the row at logged steps.
        State: the peaks, if groups were added; otherwise none.

    Args:
        warmup_steps: optimizer steps of linear warmup.

    Raises:
        UserError: numbers out of range; `total_steps` is None, and neither `Trainer(max_steps)` nor `Trainer(max_epochs)` and
            the data say how long the run is; several optimizers; the LightningModule also returns a learning-rate scheduler;
            the `rate` of a subclass ignores `warmup_steps`.
    """

    # Defaults of the class, so that the `__init__` of a subclass need not call this one.
    warmup_steps: int = 0
    _peaks: list[float]  # one per parameter group; set by on_fit_start
    _saved_peaks: Sequence[float] = ()  # in the checkpoint that is resumed, if groups had been added
    _set_for = 0  # the last update whose rates were set

    def __init__(self, warmup_steps: Annotated[int, whole(0, STEPS)] = 0) -> None:
        check_ranges(type(self), locals())
        self.warmup_steps = warmup_steps

    @abstractmethod
    def rate(self, t: int, peak: float) -> float:
        """The learning rate of update `t` = 1, 2, … for a parameter group whose peak rate is `peak`."""

    def resolve(self, trainer: Trainer) -> None:
        """Read and check the trainer's settings that the schedule needs. on_fit_start calls this. Here it does nothing."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.lr_scheduler_configs:
            theirs = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise UserError(
                f"{type(self).__name__} and the {theirs} returned by {type(pl_module).__name__}.configure_optimizers"
                f" would both set the learning rate: return only the optimizer, or {without(type(self))}."
            )
        if len(trainer.optimizers) != 1:
            raise UserError(f"{type(self).__name__} needs exactly one optimizer, not {len(trainer.optimizers)}.")
        self.resolve(trainer)
        if self.warmup_steps > 1 and self.rate(1, 1.0) >= self.rate(self.warmup_steps, 1.0):
            raise UserError(
                f"{type(self).__name__}'s rate does not rise in its {self.warmup_steps} warmup steps: let its method `rate` use"
                f" self.warmup_steps, or set {setting(type(self), 'warmup_steps')} to 0."
            )
        self._peaks = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        self._set_for = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        self._peaks += self._saved_peaks[len(self._peaks) : len(trainer.optimizers[0].param_groups)]
        if step == 0 or trainer.ckpt_path is None:
            return
        for group, peak in zip(trainer.optimizers[0].param_groups, self._peaks, strict=False):
            before, here = float(group["lr"]), self.rate(step, peak)
            if not math.isclose(before, here, rel_tol=1e-5, abs_tol=1e-5 * peak):
                rank_zero_warn(
                    f"The learning rate jumps: the checkpoint of optimizer step {step} has {before:.4g}, but this"
                    f" {type(self).__name__} gives {here:.4g}. The schedule, its end or its peak differs from the checkpoint's"
                    f" ({setting(type(self))}, {setting(Trainer, 'max_steps')}, {setting(Optimizer, 'lr')})."
                )
                return

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        t = trainer.global_step + 1
        if t == self._set_for:  # another micro-batch of the same update
            return
        self._set_for = t
        groups = trainer.optimizers[0].param_groups
        if added := groups[len(self._peaks) :]:
            self._peaks += [float(group["lr"]) for group in added]
            self._saved_peaks = self._peaks
        for group, peak in zip(groups, self._peaks, strict=True):
            rate = self.rate(t, peak)
            if isinstance(group["lr"], torch.Tensor):  # capturable and compiled optimizers keep the rate in a tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        step = trainer.global_step + 1
        if not is_logged(trainer, step):
            return
        groups = optimizer.param_groups
        row = {name: float(groups[i]["lr"]) for name, i in rate_curves(groups, self._peaks).items()}
        write_row(trainer, row, step)

    def state_dict(self) -> dict[str, Any]:
        return {"peaks": self._peaks} if self._saved_peaks else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_peaks = state_dict["peaks"]


def _length_of_run(trainer: Trainer, schedule: Schedule, remedy: str) -> int:
    """Number of optimizer steps of the run: `Trainer(max_steps)`, or else the steps of `max_epochs`, if the length of the data
    is known and no GradientAccumulationScheduler changes the batch. If neither is known, raises a UserError.

    Args:
        remedy: end of the error's sentence: " or " and the other setting that says where the schedule ends, if there is one.
    """
    if trainer.max_steps != -1:
        return trainer.max_steps
    if not any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks):  # type: ignore[attr-defined]
        steps = trainer.estimated_stepping_batches  # infinite without max_epochs, -1 for data without a length
        if 0 < steps < math.inf:
            rank_zero_info(f"{type(schedule).__name__}: {trainer.max_epochs} epochs are {steps:,} optimizer steps.")
            return int(steps)
    raise UserError(f"{type(schedule).__name__} needs a number of steps: set {setting(Trainer, 'max_steps')}{remedy}.")


class _Horizon(Schedule):
    """Base class of schedules whose rate decays to a final rate at a last step: over all steps after warmup, or at the end.

    Args:
        warmup_steps: optimizer steps of linear warmup.
        final_ratio: final rate / peak rate, in [0, 1].
        total_steps: optimizer step at which the rate reaches the final rate; None = the last step of the run.
    """

    shape: DecayShape

    def __init__(
        self,
        warmup_steps: int = 0,
        final_ratio: Annotated[float, at_least(0, 1)] = 0.1,
        total_steps: Annotated[int | None, whole(1, STEPS)] = None,
    ) -> None:
        check_ranges(type(self), locals())
        super().__init__(warmup_steps)
        self.final_ratio = final_ratio
        self.total_steps = total_steps
        self._total = 0  # set by resolve()
        self._decay: int | None = None  # steps; None: all after warmup

    def resolve(self, trainer: Trainer) -> None:
        # `fast_dev_run` replaces max_steps. Its few steps are the first ones of a run of unknown length.
        if self.total_steps is not None:
            self._total = self.total_steps
        elif getattr(trainer, "fast_dev_run", False):
            self._total = 10**9
        else:
            self._total = _length_of_run(trainer, self, f" or {setting(type(self), 'total_steps')}")
        if self.warmup_steps > self._total:
            raise UserError(
                f"warmup_steps is {self.warmup_steps} but the schedule ends after {self._total} steps:"
                f" lower {setting(type(self), 'warmup_steps')} or raise {setting(Trainer, 'max_steps')}."
            )

    def rate(self, t: int, peak: float) -> float:
        steps: dict[str, Any] = {"warmup_steps": self.warmup_steps, "total_steps": self._total, "decay_steps": self._decay}
        return wsd(t, peak=peak, final=self.final_ratio * peak, shape=self.shape, **steps)


class Cosine(_Horizon):
    """The rate rises in the warmup, then falls by a cosine to `final_ratio`·peak at `total_steps`. See :class:`Schedule`."""

    shape = "cosine"


class Linear(_Horizon):
    """The rate rises in the warmup, then falls evenly to `final_ratio`·peak at `total_steps`. See :class:`Schedule`."""

    shape = "linear"


class Constant(Schedule):
    """The rate rises in the warmup, then stays at its peak. See :class:`Schedule`."""

    def rate(self, t: int, peak: float) -> float:
        return peak * t / self.warmup_steps if t <= self.warmup_steps else peak


class InverseSquareRoot(Schedule):
    """The rate rises in the warmup, then is peak·√(warmup_steps/t) (Vaswani et al. 2017); without warmup, peak/√t."""

    def rate(self, t: int, peak: float) -> float:
        if t <= self.warmup_steps:
            return peak * t / self.warmup_steps
        return peak * math.sqrt(max(self.warmup_steps, 1) / t)


class WSD(_Horizon):
    """The rate rises in the warmup, stays at its peak, and falls in the last steps. See :func:`wsd`, :class:`Schedule`.

    Rates before the decay do not depend on `total_steps`. So a checkpoint of the stable phase can be continued with a
    larger `total_steps`, or branched into a decay.

    Args:
        warmup_steps: optimizer steps of linear warmup.
        final_ratio: final rate / peak rate, in [0, 1]; above 0 for the exponential shape.
        total_steps: optimizer step at which the rate reaches the final rate; None = the last step of the run.
        decay_steps: optimizer steps of decay; None = `decay_fraction` of `total_steps`, rounded, at least 1.
        decay_fraction: share of all steps in which the rate decays, in (0, 1], if `decay_steps` is None.
        shape: form of the decay, see :func:`decayed`.
    """

    def __init__(
        self,
        warmup_steps: int = 0,
        final_ratio: float = 0.1,
        total_steps: int | None = None,
        decay_steps: Annotated[int | None, whole(1, STEPS)] = None,
        decay_fraction: Annotated[float, Domain(0, 1, above_low=True)] = 0.2,
        shape: DecayShape = "one_minus_sqrt",
    ) -> None:
        check_ranges(type(self), locals())
        super().__init__(warmup_steps, final_ratio, total_steps)
        _refuse_endless(type(self), shape, final_ratio)
        self.decay_steps = decay_steps
        self.decay_fraction = decay_fraction
        self.shape = shape

    @property
    def stable_until(self) -> int | None:
        """The last optimizer step before the decay, from whose checkpoint a run can branch or go on. None before `fit`."""
        return self._total - self._decay if self._decay else None

    def resolve(self, trainer: Trainer) -> None:
        super().resolve(trainer)
        self._decay = self.decay_steps or max(1, round(self.decay_fraction * self._total))
        if self.warmup_steps + self._decay > self._total:
            raise UserError(
                f"Warmup ({self.warmup_steps} steps) and decay ({self._decay} steps) overlap in a schedule of"
                f" {self._total} steps: lower "
                + ", ".join(setting(type(self), name) for name in ("warmup_steps", "decay_steps", "decay_fraction"))
                + "."
            )


class Decay(Schedule):
    """Decays the learning rates of the resumed checkpoint to `final_ratio` times these rates, over all remaining steps.

    Use this schedule to anneal any checkpoint, whatever its schedule was: without warmup, and without a jump of the rate. The
    decay begins at the checkpoint's step with the checkpoint's rates, one per parameter group. Step and rates are saved, so an
    interrupted decay can be resumed. A rate depends only on them and on the present step, see :func:`decayed`. Without a
    checkpoint, the decay begins at step 0 with the configured rates.

    Contract, in addition to :class:`Schedule`:
        on_train_start: stores the first step and the first rates, unless the checkpoint is from an earlier part of this decay.
        State: step and rates at the beginning of the decay; plain numbers.

    Args:
        final_ratio: rate at the trainer's max_steps / rate at the beginning, in [0, 1]; above 0 for the exponential shape.
        shape: form of the decay, see :func:`decayed`.

    Raises:
        UserError: numbers out of range; a run of unknown length; a checkpoint whose rates are all 0.
    """

    def __init__(self, final_ratio: Annotated[float, at_least(0, 1)] = 0.0, shape: DecayShape = "one_minus_sqrt") -> None:
        super().__init__()
        check_ranges(type(self), locals())
        _refuse_endless(type(self), shape, final_ratio)
        self.final_ratio = final_ratio
        self.shape = shape
        self._total = 0
        self._began: int | None = None  # optimizer steps made before the decay
        self._rates: list[float] = []  # at that step, one per parameter group

    def resolve(self, trainer: Trainer) -> None:
        self._total = _length_of_run(trainer, self, "")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._began is None:
            self._began = trainer.global_step
            self._rates = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
            if not any(self._rates):
                raise UserError(
                    f"Decay begins at the checkpoint's learning rate, but that is 0 after step {self._began}: resume a"
                    " checkpoint from before the end of its schedule (--resume)."
                )
        self._peaks = self._rates
        super().on_train_start(trainer, pl_module)

    def rate(self, t: int, peak: float) -> float:
        assert self._began is not None
        x = (t - self._began) / max(1, self._total - self._began)  # logged also where no step is left
        return decayed(x, peak=peak, final=self.final_ratio * peak, shape=self.shape)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self._began, "rates": self._rates}  # `on_train_start` makes them the peaks: added groups count

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._began, self._rates = state_dict["began"], state_dict["rates"]

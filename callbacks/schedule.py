"""Learning-rate schedules: pure functions of the update number, and callbacks that only apply them.

Because the rate is a function of the step and of nothing else there is no state to save: a resumed, extended or
branched run computes the same rate as one that never stopped.

Notation of every function: `t` = 1, 2, … is the number of the update being made, `peak` the largest rate, `final` the
rate at the end. Warmup is peak·t/warmup_steps, so the first update already moves the weights (a first rate of 0 wastes
a step).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from ._lightning import is_logged, write_row
from .errors import ConfigurationError

DecayShape = Literal["linear", "cosine", "one_minus_sqrt", "exponential"]
_SHAPES = ("linear", "cosine", "one_minus_sqrt", "exponential")


def cosine(t: int, *, peak: float, final: float, warmup_steps: int, total_steps: int) -> float:
    """final + ½(peak − final)(1 + cos(π·(t − warmup)/(total − warmup))), then `final` (Loshchilov & Hutter 2017)."""
    if t <= warmup_steps:
        return peak * t / warmup_steps
    if t >= total_steps:
        return final
    return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * (t - warmup_steps) / (total_steps - warmup_steps)))


def linear(t: int, *, peak: float, final: float, warmup_steps: int, total_steps: int) -> float:
    """A straight line from `peak` at the end of warmup to `final` at `total_steps`, then `final`."""
    if t <= warmup_steps:
        return peak * t / warmup_steps
    if t >= total_steps:
        return final
    return peak + (final - peak) * (t - warmup_steps) / (total_steps - warmup_steps)


def constant(t: int, *, peak: float, warmup_steps: int) -> float:
    """Warmup, then `peak` for ever."""
    return peak * t / warmup_steps if t <= warmup_steps else peak


def inverse_square_root(t: int, *, peak: float, warmup_steps: int) -> float:
    """peak·√(warmup/t) after warmup (Vaswani et al. 2017). Without warmup the decay starts at once: peak/√t."""
    if t <= warmup_steps:
        return peak * t / warmup_steps
    return peak * math.sqrt(max(warmup_steps, 1) / t)


def wsd(
    t: int,
    *,
    peak: float,
    final: float,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int,
    shape: DecayShape,
) -> float:
    """Warmup, stable at `peak`, and over the last `decay_steps` a decay to `final` (Hu et al. 2024). See :func:`decayed`."""
    if t <= warmup_steps:
        return peak * t / warmup_steps
    decay_start = total_steps - decay_steps
    if t <= decay_start:
        return peak
    return decayed((t - decay_start) / decay_steps, peak=peak, final=final, shape=shape)


def decayed(x: float, *, peak: float, final: float, shape: DecayShape) -> float:
    """The rate after the part x in (0, 1] of a decay from `peak`; `final` for x ≥ 1.

    linear: peak + (final − peak)·x; cosine: final + ½(peak − final)(1 + cos πx);
    one_minus_sqrt: final + (peak − final)(1 − √x); exponential: peak·(final/peak)^x.
    """
    if x >= 1:
        return final
    if shape == "linear":
        return peak + (final - peak) * x
    if shape == "cosine":
        return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * x))
    if shape == "one_minus_sqrt":
        return final + (peak - final) * (1 - math.sqrt(x))
    assert shape == "exponential", shape
    return peak * (final / peak) ** x


def _check_final_ratio(final_ratio: float) -> None:
    if not 0 <= final_ratio <= 1:
        raise ConfigurationError(
            f"final_ratio is {final_ratio} but final rate / peak rate must lie in [0, 1] (--schedule.final_ratio)."
        )


def _check_shape(shape: str, final_ratio: float) -> None:
    if shape not in _SHAPES:
        raise ConfigurationError(f"shape is {shape!r} but must be one of {', '.join(_SHAPES)} (--schedule.shape).")
    if shape == "exponential" and final_ratio == 0:
        raise ConfigurationError("An exponential decay never reaches 0: give --schedule.final_ratio a value above 0.")


class Schedule(Callback, ABC):
    """Sets every parameter group's rate to schedule(update number), the group's own configured rate being the peak.

    Logs: `lr` (first parameter group) and `lr/<name>` for each further group whose peak differs from the first one's
    (name = `group["name"]`, else the group's index).

    Contract:
        on_fit_start: captures the peaks. Later would be too late: restoring a checkpoint overwrites the groups' rates.
        on_train_start: warns when the checkpoint that is resumed was made at another rate than this schedule gives its step.
        on_train_batch_start: sets the rates of the update to come, once an optimizer step.
        on_before_optimizer_step: writes the row at logged steps.
        State: none.

    Raises:
        ConfigurationError: numbers out of range; no `total_steps` while `Trainer(max_steps=-1)`; more than one optimizer; the
            LightningModule returns a learning-rate scheduler of its own.
    """

    def __init__(self, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ConfigurationError(f"warmup_steps is {warmup_steps} but must be >= 0 (--schedule.warmup_steps).")
        self.warmup_steps = warmup_steps
        self._peaks: list[float] = []  # one per parameter group
        self._set_for = 0  # the update number the rates were last set for

    @abstractmethod
    def rate(self, t: int, peak: float) -> float:
        """The learning rate of update `t` = 1, 2, … for a parameter group whose peak rate is `peak`."""

    def resolve(self, trainer: Trainer) -> None:
        """Read what this schedule takes from the trainer; checks that need it belong here too. Default: nothing."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.lr_scheduler_configs:
            theirs = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ConfigurationError(
                f"{type(self).__name__} and the {theirs} returned by {type(pl_module).__name__}.configure_optimizers"
                " would both set the learning rate: return only the optimizer, or drop the callback (`schedule: null`)."
            )
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(f"{type(self).__name__} drives one optimizer but there are {len(trainer.optimizers)}.")
        self.resolve(trainer)
        self._peaks = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        self._set_for = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        if step == 0 or trainer.ckpt_path is None:
            return
        for group, peak in zip(trainer.optimizers[0].param_groups, self._peaks, strict=True):
            before, here = float(group["lr"]), self.rate(step, peak)
            if not math.isclose(before, here, rel_tol=1e-5, abs_tol=1e-5 * peak):
                rank_zero_warn(
                    f"The learning rate jumps: optimizer step {step} was made at {before:.4g}, and this"
                    f" {type(self).__name__} goes on as if it had been {here:.4g}. The schedule, its end or its peak is not"
                    " that of the checkpoint (--schedule, --trainer.max_steps, --optimizer.lr)."
                )
                return

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        t = trainer.global_step + 1
        if t == self._set_for:  # a further micro-batch of the same update
            return
        self._set_for = t
        for group, peak in zip(trainer.optimizers[0].param_groups, self._peaks, strict=True):
            rate = self.rate(t, peak)
            if isinstance(group["lr"], torch.Tensor):  # capturable and compiled optimizers hold it in a tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        step = trainer.global_step + 1
        if not is_logged(trainer, step):
            return
        row = {}
        for i, (group, peak) in enumerate(zip(optimizer.param_groups, self._peaks, strict=True)):
            if i == 0:
                row["lr"] = float(group["lr"])
            elif peak != self._peaks[0]:
                row[f"lr/{group.get('name', i)}"] = float(group["lr"])
        write_row(trainer, row, step)


class _Horizon(Schedule):
    """A schedule that ends: it has a final rate and a number of steps, by default the trainer's."""

    def __init__(self, warmup_steps: int, final_ratio: float, total_steps: int | None) -> None:
        super().__init__(warmup_steps)
        _check_final_ratio(final_ratio)
        if total_steps is not None and total_steps < 1:
            raise ConfigurationError(f"total_steps is {total_steps} but must be >= 1 (--schedule.total_steps).")
        self.final_ratio = final_ratio
        self.total_steps = total_steps
        self._total = 0  # known once the trainer is

    def resolve(self, trainer: Trainer) -> None:
        self._total = trainer.max_steps if self.total_steps is None else self.total_steps
        if self._total == -1:
            raise ConfigurationError(
                f"{type(self).__name__} needs to know where it ends but the run has no number of steps:"
                " set --trainer.max_steps or --schedule.total_steps."
            )
        if self.warmup_steps > self._total:
            raise ConfigurationError(
                f"warmup_steps is {self.warmup_steps} but the schedule ends after {self._total} steps:"
                " lower --schedule.warmup_steps or raise --trainer.max_steps."
            )


class Cosine(_Horizon):
    """Warmup, then half a cosine to `final_ratio`·peak at `total_steps`. See :func:`cosine`, :class:`Schedule`.

    Args:
        warmup_steps: optimizer steps of linear warmup.
        final_ratio: final rate / peak rate, in [0, 1].
        total_steps: optimizer steps at which the final rate is reached; None = the trainer's max_steps.
    """

    def __init__(self, warmup_steps: int = 0, final_ratio: float = 0.1, total_steps: int | None = None) -> None:
        super().__init__(warmup_steps, final_ratio, total_steps)

    def rate(self, t: int, peak: float) -> float:
        final = self.final_ratio * peak
        return cosine(t, peak=peak, final=final, warmup_steps=self.warmup_steps, total_steps=self._total)


class Linear(_Horizon):
    """Warmup, then a straight line to `final_ratio`·peak at `total_steps`. See :func:`linear`, :class:`Schedule`.

    Args:
        warmup_steps: optimizer steps of linear warmup.
        final_ratio: final rate / peak rate, in [0, 1].
        total_steps: optimizer steps at which the final rate is reached; None = the trainer's max_steps.
    """

    def __init__(self, warmup_steps: int = 0, final_ratio: float = 0.1, total_steps: int | None = None) -> None:
        super().__init__(warmup_steps, final_ratio, total_steps)

    def rate(self, t: int, peak: float) -> float:
        final = self.final_ratio * peak
        return linear(t, peak=peak, final=final, warmup_steps=self.warmup_steps, total_steps=self._total)


class Constant(Schedule):
    """Warmup, then the peak for ever. See :func:`constant`, :class:`Schedule`.

    Args:
        warmup_steps: optimizer steps of linear warmup.
    """

    def rate(self, t: int, peak: float) -> float:
        return constant(t, peak=peak, warmup_steps=self.warmup_steps)


class InverseSquareRoot(Schedule):
    """Warmup, then peak·√(warmup_steps/t). See :func:`inverse_square_root`, :class:`Schedule`.

    Args:
        warmup_steps: optimizer steps of linear warmup; also the time scale of the decay.
    """

    def rate(self, t: int, peak: float) -> float:
        return inverse_square_root(t, peak=peak, warmup_steps=self.warmup_steps)


class WSD(_Horizon):
    """Warmup, stable, decay over the last steps. See :func:`wsd`, :class:`Schedule`.

    A checkpoint of the stable phase can be continued with a larger `total_steps`, or branched into a decay: no rate
    before the decay depends on where the run ends.

    Args:
        warmup_steps: optimizer steps of linear warmup.
        final_ratio: final rate / peak rate, in [0, 1]; above 0 for the exponential shape.
        total_steps: optimizer steps at which the final rate is reached; None = the trainer's max_steps.
        decay_steps: optimizer steps of decay; None = `decay_fraction` of the total, rounded, at least 1.
        decay_fraction: used when `decay_steps` is None; in (0, 1].
        shape: of the decay.
    """

    def __init__(
        self,
        warmup_steps: int = 0,
        final_ratio: float = 0.1,
        total_steps: int | None = None,
        decay_steps: int | None = None,
        decay_fraction: float = 0.2,
        shape: DecayShape = "one_minus_sqrt",
    ) -> None:
        super().__init__(warmup_steps, final_ratio, total_steps)
        _check_shape(shape, final_ratio)
        if decay_steps is not None and decay_steps < 1:
            raise ConfigurationError(f"decay_steps is {decay_steps} but must be >= 1 (--schedule.decay_steps).")
        if not 0 < decay_fraction <= 1:
            raise ConfigurationError(f"decay_fraction is {decay_fraction} but must lie in (0, 1] (--schedule.decay_fraction).")
        self.decay_steps = decay_steps
        self.decay_fraction = decay_fraction
        self.shape = shape
        self._decay = 0

    @property
    def stable_until(self) -> int | None:
        """The last optimizer step before the decay: a checkpoint of it can be branched and extended. None before fit."""
        return self._total - self._decay if self._decay else None

    def resolve(self, trainer: Trainer) -> None:
        super().resolve(trainer)
        self._decay = self.decay_steps or max(1, round(self.decay_fraction * self._total))
        if self.warmup_steps + self._decay > self._total:
            raise ConfigurationError(
                f"warmup_steps ({self.warmup_steps}) and decay ({self._decay} steps) overlap in a schedule of"
                f" {self._total} steps: lower --schedule.warmup_steps, .decay_steps or .decay_fraction."
            )

    def rate(self, t: int, peak: float) -> float:
        return wsd(
            t,
            peak=peak,
            final=self.final_ratio * peak,
            warmup_steps=self.warmup_steps,
            total_steps=self._total,
            decay_steps=self._decay,
            shape=self.shape,
        )


class Decay(Schedule):
    """From the rates of the checkpoint that is resumed down to `final_ratio` of them, over all the steps that are left.

    For annealing a run from wherever it is: no warmup, no peak, no jump, whatever schedule and rates it was trained with. The
    step and the rates (one per parameter group) at which it begins are those of the checkpoint. They are its state, so a decay
    that is itself interrupted goes on; all else is a pure function of the step, see :func:`decayed`. In a run that resumes
    nothing it begins at step 0 with the configured rates.

    Contract, beside that of :class:`Schedule`:
        on_train_start: takes the step and the rates, unless it has them from a checkpoint of its own.
        State: both; plain numbers.

    Args:
        final_ratio: rate at the trainer's max_steps / rate at the beginning, in [0, 1]; above 0 for the exponential shape.
        shape: of the decay.

    Raises:
        ConfigurationError: numbers out of range; a run without a number of steps; a checkpoint whose rates are all 0.
    """

    def __init__(self, final_ratio: float = 0.0, shape: DecayShape = "one_minus_sqrt") -> None:
        super().__init__()
        _check_final_ratio(final_ratio)
        _check_shape(shape, final_ratio)
        self.final_ratio = final_ratio
        self.shape = shape
        self._total = 0
        self._began: int | None = None  # optimizer steps made before the decay
        self._rates: list[float] = []  # of these steps' last, one per parameter group

    def resolve(self, trainer: Trainer) -> None:
        self._total = trainer.max_steps
        if self._total == -1:
            raise ConfigurationError(
                "Decay needs to know where it ends but the run has no number of steps: set --trainer.max_steps."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._began is None:
            self._began = trainer.global_step
            self._rates = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
            if not any(self._rates):
                raise ConfigurationError(
                    f"Decay begins at the learning rate of the checkpoint, which is 0 after its {self._began} steps, so nothing"
                    " would be learned: take one from before the end of its schedule (--resume)."
                )
        self._peaks = self._rates
        super().on_train_start(trainer, pl_module)

    def rate(self, t: int, peak: float) -> float:
        assert self._began is not None
        x = (t - self._began) / (self._total - self._began)
        return decayed(x, peak=peak, final=self.final_ratio * peak, shape=self.shape)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self._began, "rates": self._rates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._began, self._rates = state_dict["began"], state_dict["rates"]

"""The speed that a run measured, used for other hardware and settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lit_llm.core.errors import UserError
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.numbers import duration, two_digits
from lit_llm.plan.run_record import MeasuredRun
from lit_llm.plan.settings import RunSettings
from lit_llm.plan.speed import CPU, work_of
from lit_llm.plan.step_time import Options, step_times


@dataclass(frozen=True)
class MeasuredSpeed:
    """A measured speed as a correction of the planned one.

    Attributes:
        factor: if the dense peak of the run's hardware is known: measured over planned MFU. Otherwise measured seconds of
            computing over those that the speeds of a CPU core give; this holds for the same hardware only.
    """

    source: MeasuredRun
    factor: float

    @property
    def has_peak(self) -> bool:
        """Whether the dense peak of the run's hardware is known."""
        settings = self.source.settings
        return _peak(settings, self.source.hardware) is not None

    def holds_for(self, hardware: Hardware) -> bool:
        """Whether the speed says something about this hardware."""
        source = self.source.hardware
        return source.is_gpu and hardware.is_gpu if self.has_peak else hardware == source

    def mfu(self, planned: float, hardware: Hardware) -> float:
        """The planned MFU, corrected."""
        return planned * self.factor if self.has_peak and self.holds_for(hardware) else planned

    def computing(self, settings: RunSettings, hardware: Hardware) -> float | None:
        """Seconds of computing in a step, from the work of the step; None with a known peak, or on other hardware."""
        if self.has_peak or not self.holds_for(hardware):
            return None
        return self.factor * CPU.seconds(work_of(settings, cuda=hardware.is_gpu))

    def sentence(self, hardware: Hardware) -> str:
        """The measured speed and where it is used, for the page."""
        source, name = self.source, self.source.hardware.name
        rows = "1 row" if source.rows == 1 else f"{source.rows:,} rows"
        where = f"{source.settings.layout.devices} x {name}"
        text = f"{duration(source.step_seconds)} per step on {where}, median of {rows} ({source.run})"
        if self.holds_for(hardware):
            return f"{text}: {two_digits(self.factor)} x the planned MFU" if self.has_peak else text
        why = "a GPU and a CPU do not compare" if self.has_peak else f"the dense peak of {name} is unknown"
        return f"{text}. Not carried to {hardware.name}: {why}"

    def origin(self, planned: str, hardware: Hardware) -> str:
        """Where the corrected MFU comes from.

        Args:
            planned: where the planned one comes from.
        """
        if not self.has_peak or not self.holds_for(hardware):
            return planned
        return f"{planned}, x {two_digits(self.factor)} as in {self.source.run}"


def measured_speed(source: MeasuredRun) -> MeasuredSpeed:
    """The speed of a run as a correction of the plan for its own settings and hardware.

    Raises:
        UserError: The planned communication alone takes longer than the measured step.
    """
    settings, hardware = source.settings, source.hardware
    peak = _peak(settings, hardware)

    def step(slowness: float) -> float:
        speed = MeasuredSpeed(source, slowness if peak is None else 1 / slowness)
        seconds = step_times(settings, hardware, Options(measured=speed), peak).step
        assert seconds is not None
        return seconds

    fast, slow = 1e-12, 1e12
    if step(fast) > source.step_seconds:
        raise UserError(
            f"{source.run} took {duration(source.step_seconds)} per step, less than the {duration(step(fast))} planned for its "
            "communication alone, so its speed cannot be carried; measure a run on one device (--from_run)"
        )
    if step(slow) < source.step_seconds:
        raise UserError(f"the work of a step of {source.run} is unknown, so its speed cannot be carried (--from_run)")
    for _ in range(64):  # slower computing makes no step shorter
        middle = math.sqrt(slow * fast)
        fast, slow = (fast, middle) if step(middle) > source.step_seconds else (middle, slow)
    return MeasuredSpeed(source, slow if peak is None else 1 / slow)


def _peak(settings: RunSettings, hardware: Hardware) -> float | None:
    return hardware.peak_for(settings.precision, settings.compute.matmul_precision)


def differences(measured: RunSettings, planned: RunSettings) -> list[str]:
    """Settings that affect the speed and differ between two runs: `name before → now`."""
    found = []
    pairs: list[tuple[str, object, object]] = [
        (f"model.{field.name}", getattr(measured.model, field.name), getattr(planned.model, field.name, None))
        for field in fields(measured.model)
        if field.name not in ("init_std", "zero_init_projections", "base_width", "base_depth", "eos_id")
    ]
    for name in ("sequence_length", "sequences", "precision", "chunk_size"):
        pairs.append((name, getattr(measured, name), getattr(planned, name)))
    for name in ("activation_checkpointing", "float8", "compile"):
        pairs.append((name, getattr(measured.compute, name), getattr(planned.compute, name)))
    pairs.append(("optimizer", measured.optimizer.name, planned.optimizer.name))
    for name, before, now in pairs:
        if before != now:
            found.append(f"{name} {before} → {now}")
    return found

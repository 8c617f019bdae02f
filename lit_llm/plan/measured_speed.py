"""The speed that a run measured, used for other hardware and settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lit_llm.core.errors import UserError
from lit_llm.core.number_text import duration, two_digits
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.run_record import MeasuredRun
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.speed import dense_peak
from lit_llm.plan.step_time import Options, step_times


@dataclass(frozen=True)
class MeasuredSpeed:
    """A measured speed as a correction of the planned one.

    Attributes:
        slowness: measured over planned seconds of computing. If the dense peak of the run's hardware is unknown, the planned
            ones are those of a CPU core, and this holds for the same hardware only.
    """

    source: MeasuredRun
    slowness: float

    @property
    def has_peak(self) -> bool:
        """Whether the dense peak of the run's hardware is known."""
        return dense_peak(self.source.settings, self.source.hardware) is not None

    def holds_for(self, hardware: Hardware) -> bool:
        """Whether the speed says something about this hardware."""
        source = self.source.hardware
        return source.is_gpu and hardware.is_gpu if self.has_peak else hardware == source

    def sentence(self, hardware: Hardware) -> str:
        """The measured speed and where it is used, for the page."""
        source, name = self.source, self.source.hardware.name
        rows = "1 row" if source.rows == 1 else f"{source.rows:,} rows"
        where = f"{source.settings.layout.devices} x {name}"
        text = f"{duration(source.step_seconds)} per step on {where}, median of {rows} ({source.run})"
        if self.holds_for(hardware):
            return f"{text}: {two_digits(1 / self.slowness)} x the planned MFU" if self.has_peak else text
        why = "a GPU and a CPU do not compare" if self.has_peak else f"the dense peak of {name} is unknown"
        return f"{text}. Not carried to {hardware.name}: {why}"

    def origin(self, planned: str, hardware: Hardware) -> str:
        """Where the corrected MFU comes from.

        Args:
            planned: where the planned one comes from.
        """
        if not self.has_peak or not self.holds_for(hardware):
            return planned
        return f"{planned}, x {two_digits(1 / self.slowness)} as in {self.source.run}"


def measured_speed(source: MeasuredRun) -> MeasuredSpeed:
    """The speed of a run as a correction of the plan for its own settings and hardware.

    Raises:
        UserError: The planned communication alone takes longer than the measured step.
    """

    def step(slowness: float) -> float:
        options = Options(measured=MeasuredSpeed(source, slowness))
        seconds = step_times(source.settings, source.hardware, options).step
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
    return MeasuredSpeed(source, slow)


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

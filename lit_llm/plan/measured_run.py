"""The measured speed of a run or a machine, as a correction of the planned one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lit_llm.core.errors import UserError
from lit_llm.core.hardware import Hardware, device_of
from lit_llm.core.number_text import duration, two_digits
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.keep_rule import KeptWhole
from lit_llm.distributed.parallel_layout import Layout
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.config import GPTConfig
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.run_settings import DataFacts, RunSettings, Schedule
from lit_llm.plan.speed import Options, dense_peak, step_times
from lit_llm.plan.weights import OwnModel
from lit_llm.runs.plan_record import PLAN, measured_launch


@dataclass(frozen=True)
class MeasuredRun:
    """The newest launch of a run that measured its speed, as a correction of the planned speed.

    Attributes:
        rows: logged, of which `step_seconds` is the median.
        slowness: measured over planned seconds of computing. If the dense peak of the run's hardware is unknown, the planned
            ones are those of a CPU core, and this holds for the same hardware only.
    """

    run: Path
    settings: RunSettings
    hardware: Hardware
    step_seconds: float
    rows: int
    slowness: float = 1.0

    @property
    def has_peak(self) -> bool:
        """Whether the dense peak of the run's hardware is known."""
        return dense_peak(self.settings, self.hardware) is not None

    def holds_for(self, hardware: Hardware) -> bool:
        """Whether the speed says something about this hardware."""
        return self.hardware.is_gpu and hardware.is_gpu if self.has_peak else hardware == self.hardware

    def sentence(self, hardware: Hardware) -> str:
        """The measured speed and where it is used, for the page."""
        name = self.hardware.name
        rows = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        where = f"{self.settings.layout.devices} x {name}"
        text = f"{duration(self.step_seconds)} per step on {where}, median of {rows} ({self.run})"
        if self.holds_for(hardware):
            return f"{text}: {two_digits(1 / self.slowness)} x the planned MFU" if self.has_peak else text
        why = "a GPU and a CPU do not compare" if self.has_peak else f"the dense peak of {name} is unknown"
        return f"{text}. Not carried to {hardware.name}: {why}"

    def origin(self, planned: str, hardware: Hardware) -> str:
        """Where the corrected MFU comes from, if the planned one comes from `planned`."""
        if not self.has_peak or not self.holds_for(hardware):
            return planned
        return f"{planned}, x {two_digits(1 / self.slowness)} as in {self.run}"


def measured_run(run: Path) -> MeasuredRun:
    """What a run measured.

    Raises:
        UserError: There is no such run, or its plan.json is missing, damaged, or without a measured step.
    """
    mend = "train the run again for a few logged steps (--from_run)"
    problem = f"{run / PLAN} cannot be used: it was edited, or written by another version; {mend}"
    return _as_measured(run, measured_launch(run), problem)


def certified_run(file: Path) -> tuple[MeasuredRun, float | None]:
    """What a certificate (`python -m lit_llm certify`) measured of a step, and GB/s of writing a checkpoint.

    The speed of its slowest all-reduce is the bandwidth between devices of a node.

    Raises:
        UserError: The file cannot be read, or its speeds were not measured.
    """
    flag, mend = "(--from_certificate)", "run `python -m lit_llm certify` again"
    try:
        checks = {each["name"]: each for each in json.loads(file.read_text(encoding="utf-8"))["checks"]}
        gbps = {name: each["details"]["gbps"] for name, each in checks.items() if "gbps" in each["details"]}
        links = [float(value) for name, value in gbps.items() if name.endswith("/all_reduce")]
        speed = checks.get("speed/plain loop", {"details": {}})["details"].get("speed")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror} {flag}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{file} is not a certificate: {mend} {flag}") from None
    if speed is None:
        raise UserError(f"{file} has no speed, because the check 'speed/plain loop' was not made: {mend} {flag}")
    run = _as_measured(file, speed, f"{file} cannot be used: it was edited, or written by another version; {mend} {flag}")
    if links:
        run = replace(run, hardware=replace(run.hardware, node_gbps=min(links)))
    return run, gbps.get("disk/write")


def _as_measured(source: Path, found: dict[str, Any], problem: str) -> MeasuredRun:
    """
    Raises:
        UserError: `problem`, because something is missing or not of its kind.
    """
    try:
        seconds, rows = float(found["measured"]["step_seconds"]), int(found["measured"]["rows"])
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError
        hardware = dict(found["hardware"])
        known = device_of(hardware.pop("name"), hardware)
        return MeasuredRun(source, _settings(found["settings"]), known, seconds, rows)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise UserError(problem) from None


def settings_values(settings: RunSettings) -> dict[str, Any]:
    """Settings as JSON takes them, without the size of the data and the rates."""
    return asdict(replace(settings, data=DataFacts(), schedule=Schedule(settings.schedule.kind)))


def _settings(values: dict[str, Any]) -> RunSettings:
    """What `settings_values` wrote."""
    from lit_llm.models.custom import Architecture  # these import torch
    from lit_llm.models.lora import LoRAConfig

    layout, lora, model = values["layout"], values["lora"], values["model"]
    kept, pipeline = KeptWhole(*layout["kept"]), PipelineLayout(*layout["pipeline"])
    own = "architecture" in model and Architecture(**model["architecture"])
    parts = {
        "model": OwnModel(**{**model, "architecture": own}) if own else GPTConfig(**model),
        "optimizer": Optimizer(**values["optimizer"]),
        "compute": ComputeConfig(**values["compute"]),
        "layout": Layout(**{**layout, "auto": tuple(layout["auto"]), "kept": kept, "pipeline": pipeline}),
        "schedule": Schedule(**values["schedule"]),
        "data": DataFacts(),
        "ramp": tuple((first, size) for first, size in values["ramp"]),
        "lora": None if lora is None else LoRAConfig(**lora),
    }
    return RunSettings(**{**values, **parts})


def with_slowness(source: MeasuredRun) -> MeasuredRun:
    """The run with the correction of the plan for its own settings and hardware.

    Raises:
        UserError: The planned communication alone takes longer than the measured step.
    """

    def step(slowness: float) -> float:
        options = Options(measured=replace(source, slowness=slowness))
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
    return replace(source, slowness=slow)


def differences(measured: RunSettings, planned: RunSettings) -> list[str]:
    """Settings that affect the speed and differ between two runs: `name before → now`."""
    without_effect = ("init_std", "zero_init_projections", "base_width", "base_depth", "eos_id")
    names = [field.name for field in fields(measured.model) if field.name not in without_effect]
    pairs = [(f"model.{name}", getattr(measured.model, name), getattr(planned.model, name, None)) for name in names]
    for name in ("sequence_length", "sequences", "precision", "chunk_size"):
        pairs.append((name, getattr(measured, name), getattr(planned, name)))
    for name in ("activation_checkpointing", "float8", "compile"):
        pairs.append((name, getattr(measured.compute, name), getattr(planned.compute, name)))
    pairs.append(("optimizer", measured.optimizer.name, planned.optimizer.name))
    return [f"{name} {before} → {now}" for name, before, now in pairs if before != now]

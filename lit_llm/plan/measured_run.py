"""Read the measured speed of a run (plan.json) or a machine (a certificate), which corrects the speed that a plan predicts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lit_llm.core.errors import UserError
from lit_llm.core.hardware import Hardware, device_of
from lit_llm.core.number_text import counted, duration, two_digits
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.keep_rule import KeptWhole
from lit_llm.distributed.parallel_layout import Layout
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.config import GPTConfig
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.planned_run import DataFacts, PlannedRun, Schedule
from lit_llm.plan.weights import OwnModel
from lit_llm.runs.plan_record import PLAN, measured_launches
from lit_llm.runs.run_folder import CONFIG


@dataclass(frozen=True)
class MeasuredRun:
    """Record of a speed that a launch of a run, or `certify`, measured. It corrects the speed that a plan predicts.

    Attributes:
        run: the run's folder, or the certificate's file.
        settings, hardware: settings of the measured run, and the device on which it ran.
        step_seconds: measured seconds of an optimizer step, the median of the logged rows.
        rows: number of logged rows in the median.
        slowness: measured seconds of computing divided by planned seconds (`speed.with_slowness`). If the dense peak of
            `hardware` is unknown, the plan assumes 1 TFLOP/s, and the ratio holds for the same hardware only.
    """

    run: Path
    settings: PlannedRun
    hardware: Hardware
    step_seconds: float
    rows: int
    slowness: float = 1.0

    @property
    def has_peak(self) -> bool:
        """Whether the dense peak (TFLOP/s) of the measured run's hardware is known."""
        return self.settings.dense_peak(self.hardware) is not None

    def holds_for(self, hardware: Hardware) -> bool:
        """Whether `slowness` corrects plans for `hardware`: if it and the measured hardware are GPUs or, if the dense peak of
        the measured hardware is unknown, if both are the same hardware."""
        return self.hardware.is_gpu and hardware.is_gpu if self.has_peak else hardware == self.hardware

    def sentence(self, hardware: Hardware) -> str:
        """Return a sentence for the page of a plan for `hardware`: the measured speed, and whether it corrects this plan."""
        name = self.hardware.name
        where = f"{self.settings.layout.devices} x {name}"
        text = f"{duration(self.step_seconds)} per step on {where}, median of {counted(self.rows, 'row')} ({self.run})"
        if self.holds_for(hardware):
            return f"{text}: {two_digits(1 / self.slowness)} x the planned MFU" if self.has_peak else text
        why = "a GPU and a CPU do not compare" if self.has_peak else f"the dense peak of {name} is unknown"
        return f"{text}. Not carried to {hardware.name}: {why}"

    def origin(self, planned: str, hardware: Hardware) -> str:
        """Return a text for the origin of the MFU of a plan for `hardware`: the text `planned` (the origin of the uncorrected
        MFU), and the factor of the correction if this measurement corrects the plan."""
        if not self.has_peak or not self.holds_for(hardware):
            return planned
        return f"{planned}, x {two_digits(1 / self.slowness)} as in {self.run}"


def measured_run(run: Path) -> MeasuredRun:
    """Return the speed that the newest launch with a measured speed has in the plan.json of the run folder `run`.

    Raises:
        UserError: `run` is no run folder, or its plan.json is missing, damaged, or without a measured step.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: it has no {CONFIG} (--from_run)")
    mend = "train the run again for a few logged steps (--from_run)"
    if not (launches := measured_launches(run)):
        raise UserError(f"{run / PLAN} has no measured step, is damaged or was not written (--plan, --throughput); {mend}")
    return _as_measured(run, launches[-1], f"{run / PLAN} cannot be used: it was edited, or written by another version; {mend}")


def certified_run(file: Path) -> tuple[MeasuredRun, float | None]:
    """Return (the measured speed of training, GB/s of writing a checkpoint or None) from a certificate of `lit_llm certify`.

    If the certificate has measured all-reduces, the slowest one gives the bandwidth between devices of a node.

    Raises:
        UserError: `file` cannot be read, is no certificate, or has no measured speed.
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


def _as_measured(source: Path, values: dict[str, Any], problem: str) -> MeasuredRun:
    """Return the measured run that `values` describe. `values` come from the certificate or run folder `source`.

    Raises:
        UserError: a value is missing or has a wrong type. The message is `problem`.
    """
    try:
        seconds, rows = float(values["measured"]["step_seconds"]), int(values["measured"]["rows"])
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError
        hardware = dict(values["hardware"])
        known = device_of(hardware.pop("name"), hardware)
        return MeasuredRun(source, _settings(values["settings"]), known, seconds, rows)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise UserError(problem) from None


def settings_values(run: PlannedRun) -> dict[str, Any]:
    """Return the fields of `run` as a dict for JSON. The size of the data and the learning rates get placeholders (unknown)."""
    return asdict(replace(run, data=DataFacts(), schedule=Schedule(run.schedule.kind)))


def _settings(values: dict[str, Any]) -> PlannedRun:
    """Return the `PlannedRun` of the dict `values` that `settings_values` returned."""
    from lit_llm.models.custom import Architecture  # these import torch
    from lit_llm.models.lora import LoRAConfig
    from lit_llm.models.loss import LossConfig

    layout, lora, model = values["layout"], values["lora"], values["model"]
    kept, pipeline = KeptWhole(*layout["kept"]), PipelineLayout(*layout["pipeline"])
    own = "architecture" in model and Architecture(**model["architecture"])
    parts = {
        "model": OwnModel(**{**model, "architecture": own}) if own else GPTConfig(**model),
        "optimizer": Optimizer(**values["optimizer"]),
        "compute": ComputeConfig(**values["compute"]),
        "layout": Layout(**{**layout, "auto": tuple(layout["auto"]), "kept": kept, "pipeline": pipeline}),
        "loss": LossConfig(**values["loss"]),
        "schedule": Schedule(**values["schedule"]),
        "data": DataFacts(),
        "ramp": tuple((first, size) for first, size in values["ramp"]),
        "lora": None if lora is None else LoRAConfig(**lora),
    }
    return PlannedRun(**{**values, **parts})


def differences(measured: PlannedRun, planned: PlannedRun) -> list[str]:
    """Return a text like "compile False → True" for each setting that affects the speed and has another value in `planned`."""
    without_effect = ("init_std", "zero_init_projections", "base_width", "base_depth", "eos_id")
    names = [field.name for field in fields(measured.model) if field.name not in without_effect]
    pairs = [(f"model.{name}", getattr(measured.model, name), getattr(planned.model, name, None)) for name in names]
    pairs += [(name, getattr(measured, name), getattr(planned, name)) for name in ("sequence_length", "sequences", "precision")]
    pairs.append(("chunk_size", measured.loss.chunk_size, planned.loss.chunk_size))
    for name in ("activation_checkpointing", "float8", "compile"):
        pairs.append((name, getattr(measured.compute, name), getattr(planned.compute, name)))
    pairs.append(("optimizer", measured.optimizer.name, planned.optimizer.name))
    return [f"{name} {before} → {now}" for name, before, now in pairs if before != now]

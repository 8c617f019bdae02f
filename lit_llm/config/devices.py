"""The devices of a launch: what `trainer.devices` means, here or on a machine that a run is planned for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jsonargparse import Namespace

from lit_llm.core.ranks import launched_ranks
from lit_llm.runs.resume import RunStart
from lit_llm.training.auto_precision import Choice


@dataclass(frozen=True)
class OtherMachine:
    """Devices that a run is planned for, which need not be here.

    Attributes:
        devices: total number of devices; None: the recipe's number.
        per_node: number of devices in one machine.
        start: the checkpoint that the planned run continues from.
        precision: the meaning of trainer.precision auto on that machine; None: as on this machine.
    """

    devices: int | None = None
    per_node: int = 8
    start: RunStart = field(default_factory=RunStart)
    precision: Choice | None = None

    def devices_for(self, config: Namespace) -> int:
        """The number of devices that a recipe is planned for."""
        return self.devices or devices_of(config.trainer.devices, config.trainer.num_nodes or 1)


def device_numbers(devices: Any) -> tuple[list[int], bool]:
    """(numbers in trainer.devices, whether they list devices instead of giving a count).

    Raises:
        ValueError: an entry is no number.
    """
    entries = devices if isinstance(devices, list) else str(devices).split(",")
    return [int(entry) for entry in entries if str(entry).strip()], isinstance(devices, list) or "," in str(devices)


def devices_of(devices: Any, nodes: int) -> int:
    """Number of devices that trainer.devices asks for on `nodes` nodes. "auto", -1, None and mistakes count as one device."""
    try:
        numbers, listed = device_numbers(devices)
    except ValueError:
        return nodes
    return max(1, len(numbers) if listed else sum(numbers)) * nodes


def processes_of(trainer: Namespace) -> int:
    """Number of processes of a launch: those of torchrun or SLURM, or those that Lightning will start for `trainer`."""
    if (launched := launched_ranks()) is not None:
        return launched
    nodes = max(1, trainer.num_nodes or 1)
    if str(trainer.devices) in ("auto", "-1", "None") and trainer.accelerator != "cpu" and torch.accelerator.is_available():
        return torch.accelerator.device_count() * nodes
    return devices_of(trainer.devices, nodes)


def devices_problem(devices: Any) -> str | None:
    """Why `trainer.devices` (auto, a number, or a list of devices, also as text) is wrong on any machine; None if it is not."""
    if devices in ("auto", None):
        return None
    rule = "the number of devices, at least 1, or auto, or -1 for all GPUs, or a list such as [0,1]"
    try:
        numbers, listed = device_numbers(devices)
    except ValueError:
        return f"trainer.devices is {devices!r}, it must be {rule} (--trainer.devices auto)"
    if not numbers or (min(numbers) < 0 if listed else numbers[0] == 0 or numbers[0] < -1):
        return f"trainer.devices is {devices}, it must be {rule} (--trainer.devices 1)"
    if listed and len(set(numbers)) < len(numbers):
        unique = ",".join(str(number) for number in dict.fromkeys(numbers))
        return f"trainer.devices is {devices}, which names a device twice (--trainer.devices [{unique}])"
    return None

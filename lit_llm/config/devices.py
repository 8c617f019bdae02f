"""The number of devices that `trainer.devices` means, on this machine or on another machine for which a run is planned."""

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
    """Record of the devices for which a run is planned. This machine need not have these devices.

    Attributes:
        devices: total number of devices; None: the recipe's number.
        per_node: number of devices in one node.
        start: the checkpoint from which the planned run continues.
        precision: the precision that trainer.precision auto means on the planned devices; None: as on this machine.
    """

    devices: int | None = None
    per_node: int = 8
    start: RunStart = field(default_factory=RunStart)
    precision: Choice | None = None

    def devices_for(self, config: Namespace) -> int:
        """Return the total number of devices for which the recipe `config` is planned."""
        return self.devices or devices_of(config.trainer.devices, config.trainer.num_nodes or 1)


def device_numbers(devices: Any) -> tuple[list[int], bool]:
    """Return (numbers in a value of trainer.devices, whether they are the numbers of devices, as "0,1"; False: a count).

    Raises:
        ValueError: an entry is not a number.
    """
    entries = devices if isinstance(devices, list) else str(devices).split(",")
    return [int(entry) for entry in entries if str(entry).strip()], isinstance(devices, list) or "," in str(devices)


def devices_of(devices: Any, nodes: int) -> int:
    """Return the total number of devices on `nodes` nodes for a value of trainer.devices, the devices of one node. "auto", -1,
    None and invalid values count as one device a node."""
    try:
        numbers, listed = device_numbers(devices)
    except ValueError:
        return nodes
    return max(1, len(numbers) if listed else sum(numbers)) * nodes


def processes_of(trainer: Namespace) -> int:
    """Return the number of processes of a run: processes of torchrun or SLURM, or else the number that Lightning will start
    for the Trainer settings `trainer`."""
    if (launched := launched_ranks()) is not None:
        return launched
    nodes = max(1, trainer.num_nodes or 1)
    if str(trainer.devices) in ("auto", "-1", "None") and trainer.accelerator != "cpu" and torch.accelerator.is_available():
        return torch.accelerator.device_count() * nodes
    return devices_of(trainer.devices, nodes)


def devices_problem(devices: Any) -> str | None:
    """Return why a value of trainer.devices is invalid on every machine; None if it is valid: auto, a number, or a list."""
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

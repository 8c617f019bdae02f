"""The smallest hardware of the table that a recipe runs on, and the switches it needs there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lit_llm.plan import hardware as hardware_table
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.plan import Options, peak_memory, usable_bytes
from lit_llm.plan.settings import RunSettings, layout_from_strategy

CPU_GB = 2.0
"""What any computer has to spare: a recipe that needs no more as it stands asks for no accelerator."""
MOST_DEVICES = 4096


@dataclass(frozen=True)
class Smallest:
    """Devices of one kind, what was changed for them (flags of `fit`), and peak bytes on each."""

    hardware: Hardware
    devices: int
    switches: tuple[str, ...]
    bytes_per_device: int

    def __str__(self) -> str:
        if not self.hardware.is_gpu:
            return f"a CPU: {self.bytes_per_device / 1e9:.2f} GB"
        return f"{self.devices} x {self.hardware.name}"


def smallest(settings: RunSettings) -> Smallest | None:
    """The devices of least memory in all (then least price) that hold one rank's peak; None if not even MOST_DEVICES do.

    A CPU where that takes CPU_GB at most. Else 1, 2, 4, … devices of one kind that share everything (FSDP2), as the recipe has
    it or, where that does not fit, with micro-batches of one sequence, or full activation checkpointing, or both.

    Args:
        settings: the run; its layout is not looked at. The devices divide the batch at every time of a ramp.
    """
    options, known = Options(), hardware_table.table()
    alone = replace(settings, layout=layout_from_strategy("single", 1, 1))
    if not alone.problems():
        needed = peak_memory(alone, known["cpu"], options).total
        if needed <= CPU_GB * 1e9:
            return Smallest(known["cpu"], 1, (), needed)
    found = [each for hardware in known.values() if hardware.is_gpu and (each := _fewest(alone, hardware, options))]
    return min(found, key=_cost, default=None)


def _cost(found: Smallest) -> tuple[float, float, float, str]:
    hardware, n = found.hardware, found.devices
    assert hardware.memory_gb is not None and hardware.price_usd_hour is not None
    low, high = hardware.price_usd_hour
    return n * hardware.memory_gb, n * low, n * high, hardware.name


def _fewest(alone: RunSettings, hardware: Hardware, options: Options) -> Smallest | None:
    n = 1
    while n <= MOST_DEVICES:
        layout = layout_from_strategy("fsdp2", n, hardware.devices_per_node)
        for switches, tried in _variants(replace(alone, layout=layout)):
            if not tried.problems() and (needed := peak_memory(tried, hardware, options).total) <= usable_bytes(hardware):
                sharding = ("--config strategy/fsdp2",) if n > 1 else ()
                return Smallest(hardware, n, sharding + switches, needed)
        n *= 2
    return None


def _variants(settings: RunSettings) -> Iterator[tuple[tuple[str, ...], RunSettings]]:
    """As it is, then with one switch or both, where they change something."""
    one = ("--data.micro_batch_size 1",) if settings.sequences > 1 else ()
    full = ("--compute.activation_checkpointing full",) if settings.checkpointing != "full" else ()
    yield (), settings
    if one:
        yield one, replace(settings, micro_batch=1)
    if full:
        yield full, replace(settings, checkpointing="full")
    if one and full:
        yield one + full, replace(settings, micro_batch=1, checkpointing="full")

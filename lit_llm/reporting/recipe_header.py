"""The header of a recipe (the first lines of its file): figures of the recipe's plan, and the smallest hardware that fits."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from lit_llm.core import hardware as hardware_table
from lit_llm.core.hardware import Hardware
from lit_llm.core.number_text import duration, percent
from lit_llm.distributed.parallel_layout import layout_of_name
from lit_llm.plan.memory import peak_memory, resolved, usable_bytes
from lit_llm.plan.plan import Plan
from lit_llm.plan.planned_run import PlannedRun

CPU_GB = 2.0
"""Assumed GB of free memory on any computer. An unchanged recipe whose tensors take at most CPU_GB fits on a CPU."""
PROCESS_GB = 0.72
"""GB of a process without its tensors: the recipe quickstart took 1.03 GB at its peak, of which the plan counts 0.31 GB."""
MOST_DEVICES = 4096
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def header(plan: Plan, command: str) -> str:
    """Return a recipe's header: lines `# key          value  (more)`, which `recipes list` reads. `command` made `plan`."""
    command = re.sub(r" --header(?:[ =]true)?(?= |$)", "", command)
    settings, n, tokens = plan.settings, plan.settings.layout.devices, plan.settings.tokens
    unit, letter = next((each for each in _UNITS if tokens >= each[0] / 2), _UNITS[-1])
    devices, is_gpu = smallest(settings), plan.hardware.is_gpu
    where = f"on {'each of ' if n > 1 else ''}{n:,} x {plan.hardware.name}, " if is_gpu else ""
    mfu = "" if plan.mfu is None else f", at an MFU of {percent(plan.mfu)}"
    speed = (
        f"{duration(plan.run_seconds)}  (by that plan{mfu})" if plan.run_seconds else "unknown  (certify measures the speed)"
    )
    memory = f"{plan.memory.needed / 1e9:.{1 if is_gpu else 2}f} GB"
    sequences = f"{settings.global_batch_size:,} sequences of {settings.sequence_length:,}"
    facts = {
        "parameters": f"{plan.parameters:,}",
        "tokens": f"{tokens / unit:.1f}{letter}  ({settings.max_steps:,} steps)",
        "fits on": "no hardware of the table" if devices is None else f"{devices}  ({devices.how})",
        "batch": f"{sequences} = {settings.tokens_per_step:,} tokens a step",
        "plan": " \\\n#                ".join(textwrap.wrap(command, 110, break_long_words=False, break_on_hyphens=False)),
        "memory": f"{memory}  ({where}by that plan; micro-batches of {settings.sequences})",
        "time": speed,
        "expect": "the loss: measured with what and how, published where, or never run",
    }
    return "".join(f"# {key:<12} {value}\n" for key, value in facts.items())


# -- the smallest hardware --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Smallest:
    """Record of hardware for a recipe: kind and number of devices, flags of `fit` with which it fits, peak bytes per device."""

    hardware: Hardware
    devices: int
    flags: tuple[str, ...]
    bytes_per_device: int

    def __str__(self) -> str:
        if not self.hardware.is_gpu:
            return f"a CPU: {self.bytes_per_device / 1e9 + PROCESS_GB:.1f} GB"
        return f"{self.devices} x {self.hardware.name}"

    @property
    def how(self) -> str:
        """Text with the flags and the planned memory per device; on a CPU only the planned memory."""
        if not self.hardware.is_gpu:
            return f"the process; {self.bytes_per_device / 1e9:.2f} GB are tensors, by plan"
        return f"{' '.join(self.flags) or 'as it is'}: {self.bytes_per_device / 1e9:.1f} GB each"


def smallest(settings: PlannedRun) -> Smallest | None:
    """Return the hardware with the least total memory (among equals, with the lowest price) on which the run fits.

    The hardware is a CPU if the run needs at most CPU_GB, else 1, 2, 4, … GPUs of one kind with FSDP2. For each number of GPUs,
    the recipe is tried unchanged, with micro-batches of one sequence, with full activation checkpointing, and with both.

    Args:
        settings: the run; its layout is ignored. Numbers of devices that cannot share the run's batches are skipped.

    Returns:
        None if the run does not fit on MOST_DEVICES devices of any kind.
    """
    known = hardware_table.table()
    alone = replace(settings, layout=layout_of_name("single", 1, 1))
    if not alone.problems():
        needed = peak_memory(alone, cuda=False).total
        if needed <= CPU_GB * 1e9:
            return Smallest(known["cpu"], 1, (), needed)
    able = [hardware for hardware in known.values() if hardware.is_gpu and hardware.multiplies(settings.precision)]
    candidates = [each for hardware in able if (each := _fewest(alone, hardware))]
    return min(candidates, key=_cost, default=None)


def _cost(candidate: Smallest) -> tuple[float, float, float, str]:
    hardware, n = candidate.hardware, candidate.devices
    assert hardware.memory_gb is not None and hardware.price_usd_hour is not None
    low, high = hardware.price_usd_hour
    return n * hardware.memory_gb, n * low, n * high, hardware.name


def _fewest(alone: PlannedRun, hardware: Hardware) -> Smallest | None:
    for n in (2**i for i in range(MOST_DEVICES.bit_length())):
        layout = layout_of_name("fsdp2", n, hardware.devices_per_node)
        for flags, tried in _variants(replace(alone, layout=layout)):
            if tried.problems():
                continue
            needed = peak_memory(resolved(tried, hardware), cuda=True).needed
            if needed <= usable_bytes(hardware):
                sharding = ("--config strategy/fsdp2",) if n > 1 else ()
                return Smallest(hardware, n, sharding + flags, needed)
    return None


def _variants(settings: PlannedRun) -> Iterator[tuple[tuple[str, ...], PlannedRun]]:
    """Yield (flags, settings with these flags) for all combinations of two memory-saving flags: micro-batches of one sequence,
    full activation checkpointing. A flag that changes nothing is left out."""
    ones = ((), ("--data.micro_batch_size 1",))[: 1 + (settings.sequences > 1)]
    fulls = ((), ("--compute.activation_checkpointing full",))[: 1 + (settings.compute.activation_checkpointing != "full")]
    for full, one in product(fulls, ones):
        tried = replace(settings, micro_batch_size=1) if one else settings
        yield one + full, tried.changed("compute", activation_checkpointing="full") if full else tried

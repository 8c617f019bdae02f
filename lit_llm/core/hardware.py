"""Descriptions of devices: from the table `hardware.yaml`, from a user's own file, or of this machine, also by measurement."""

from __future__ import annotations

import difflib
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from lit_llm.callbacks.device_peaks import KINDS, peak_of, peaks_of
from lit_llm.core.errors import UserError
from lit_llm.core.measured_speed import copy_gbps, matmul_tflops
from lit_llm.core.memory import memory_bytes
from lit_llm.core.yaml_reading import read_yaml_file

TABLE = Path(__file__).with_name("hardware.yaml")
HOST = ("copy_gbps", "memory_gbps", "memory_gb")


@dataclass(frozen=True)
class Hardware:
    """Record of a kind of device. Unknown figures are None. Units: TFLOP/s, GB = 1e9 bytes, GB/s, USD per hour.

    Attributes:
        peak_tflops: dense peak for "bf16" (and fp16), "tf32", "fp32", "fp8".
        compute_capability: major compute capability of an NVIDIA GPU. None: another device.
        node_gbps: bandwidth in GB/s to another device of the same node, per device and direction.
        network_gbps: bandwidth in GB/s to a device of another node, per device and direction.
        watts: maximum power of the device as rated by the vendor.
        host: `copy_gbps`: GB/s of copies between a device and host memory, per device and direction; `memory_gbps`: GB/s that
            an optimizer in host memory reaches, per node; `memory_gb`: GB of host memory per node.
    """

    name: str
    device_name: str
    source: str
    peak_tflops: dict[str, float | None]
    compute_capability: int | None = None
    memory_gb: float | None = None
    memory_gbps: float | None = None
    node_gbps: float | None = None
    network_gbps: float | None = None
    devices_per_node: int = 8
    price_usd_hour: tuple[float, float] | None = None
    watts: float | None = None
    host: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(HOST))

    @property
    def is_gpu(self) -> bool:
        return not self.device_name.startswith("cpu")

    @property
    def is_before_ampere(self) -> bool:
        """Whether the device is an NVIDIA GPU whose matrix units, if any, lack bf16 and tf32."""
        return self.compute_capability is not None and self.compute_capability < 8

    def multiplies(self, precision: str) -> bool:
        """Whether matrix products in a Trainer precision run in hardware. False only for bf16 on NVIDIA GPUs before Ampere."""
        return not (precision.startswith("bf16") and self.is_before_ampere)

    def usd_hour(self, given: float | None) -> tuple[float, float] | None:
        """(lowest, highest) price of a device-hour in USD: `given` twice or, if it is None, the device's own. None: unknown."""
        return self.price_usd_hour if given is None else (given, given)

    def peak_for(self, precision: str, matmul_precision: str = "highest") -> float | None:
        """Dense matrix-product peak in TFLOP/s with a Trainer precision, or None if unknown.

        Args:
            matmul_precision: torch's float32_matmul_precision. Any value but "highest" runs fp32 products in tf32 on a GPU
                with tf32.
        """
        if not self.multiplies(precision):
            return None
        has_tf32 = self.is_gpu and not self.is_before_ampere
        return peak_of(self.peak_tflops, precision, matmul_precision if has_tf32 else "highest")


@cache
def table() -> dict[str, Hardware]:
    """All devices of hardware.yaml, by name."""
    entries = read_yaml_file(TABLE).items()
    return {name: device_of(name, {**entry, "peak_tflops": peaks_of(entry["device_name"])}) for name, entry in entries}


def device_of(name: str, entry: dict[str, Any]) -> Hardware:
    """Return the device called `name` with the attributes in `entry`, a mapping from a YAML file."""
    price = entry.get("price_usd_hour")
    return Hardware(**{"name": name, **entry, "price_usd_hour": None if price is None else (price[0], price[1])})


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf


_NUMBER: tuple[str, Callable[[Any], bool]] = ("a number above 0, or null", lambda x: x is None or _is_number(x))


def _numbers_for(keys: Sequence[str]) -> tuple[str, Callable[[Any], bool]]:
    def are_numbers(x: Any) -> bool:
        return isinstance(x, dict) and set(x) == set(keys) and all(map(_NUMBER[1], x.values()))

    return f"numbers above 0, or null, for {', '.join(keys)}", are_numbers


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = dict.fromkeys(
    [field.name for field in fields(Hardware)][1:], _NUMBER
) | {
    "source": ("a text", lambda x: isinstance(x, str) and bool(x)),
    "device_name": ("a text, cpu for processors", lambda x: isinstance(x, str) and bool(x)),
    "compute_capability": ("a whole number above 0, or null", lambda x: x is None or (isinstance(x, int) and _is_number(x))),
    "devices_per_node": ("a whole number above 0", lambda x: isinstance(x, int) and _is_number(x)),
    "peak_tflops": _numbers_for(KINDS),
    "host": _numbers_for(HOST),
    "price_usd_hour": (
        "two numbers above 0, the lower one first, or null",
        lambda x: x is None or (isinstance(x, list) and len(x) == 2 and all(map(_is_number, x)) and x[0] <= x[1]),
    ),
}
"""Key of a user's YAML file → (rule for the key's value in words, function that tests the value)."""


def from_file(path: Path) -> Hardware:
    """Read a user's own device from a YAML file with the keys of `_RULES`. The device's name is the file's name.

    Raises:
        UserError: the file cannot be read, a key is unknown or missing, or a value breaks its key's rule.
    """
    try:
        entry = read_yaml_file(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error} (--hardware).") from None
    keys = ", ".join(_RULES)
    if not isinstance(entry, dict):
        raise UserError(f"{path} must have the keys {keys} (--hardware).")
    lists = {"unknown": [key for key in entry if key not in _RULES], "missing": [key for key in _RULES if key not in entry]}
    if said := " and ".join(f"{what} {', '.join(map(str, names))}" for what, names in lists.items() if names):
        raise UserError(f"{path} has {said}; its keys are {keys} (--hardware).")
    for key, (rule, is_valid) in _RULES.items():
        if not is_valid(entry[key]):
            raise UserError(f"{path}: {key} is {entry[key]!r}, but must be {rule} (--hardware).")
    return device_of(path.stem, entry)


def find(name: str) -> Hardware:
    """The device called `name` in the hardware table, or the device that the file `name` describes (.yaml or .yml).

    Raises:
        UserError: the device is not in the table (the message lists the known names, closest first), or the file is wrong.
    """
    if name.endswith((".yaml", ".yml")):
        return from_file(Path(name))
    if hardware := table().get(name):
        return hardware
    wanted = name.lower()

    def distance(other: str) -> tuple[bool, float]:
        return not other.startswith(wanted), -difflib.SequenceMatcher(None, wanted, other).ratio()

    near = ", ".join(sorted(table(), key=distance))
    raise UserError(f"Unknown hardware {name!r}. Use --hardware auto to measure this machine, a YAML file, or one of: {near}.")


# -- this machine -----------------------------------------------------------------------------------------------------


def chosen_device(name: str) -> str:
    """The name of the torch device for a value of `--device`. "auto" is a GPU if torch can use one, else the CPU."""
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def device_problem(name: str) -> str | None:
    """A sentence if torch cannot compute on the device `name` on this machine; None if torch can."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError):  # the last: torch has no module for that kind
        return f"device {name} is not available on this machine (--device cpu)"
    return None


def this_machine(*, measure: bool, device: Any = None) -> Hardware:
    """This machine's device: its entry in the hardware table if there is one, else an entry without peaks.

    Args:
        measure: replace peaks and memory bandwidth by measured values, which takes a few seconds.
        device: a torch device. None: the first GPU, or the CPU.
    """
    import torch

    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    known = next((entry for entry in table().values() if entry.device_name == name), None)
    if known is None:
        known = replace(table()["cpu"], name=name, device_name=name, source="not in the table")
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    host = {**known.host, "memory_gb": memory_bytes(torch.device("cpu")) / 1e9}
    hardware = replace(known, memory_gb=memory_bytes(device) / 1e9, compute_capability=capability, host=host)
    if not measure:
        return hardware
    return replace(
        hardware,
        name=f"this machine ({platform.machine()})" if device.type == "cpu" else name,
        source="measured: square matrix products and a memory copy",
        peak_tflops={
            "bf16": matmul_tflops(device, torch.bfloat16),
            "fp32": matmul_tflops(device, torch.float32),
            "tf32": matmul_tflops(device, torch.float32, precision="high") if device.type == "cuda" else None,
            "fp8": None,
        },
        memory_gbps=copy_gbps(device),
    )

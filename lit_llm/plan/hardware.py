"""Kinds of devices: the table `hardware.yaml`, a user's own file, and this machine, whose speed can be measured."""

from __future__ import annotations

import difflib
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from lit_llm.core.device_peaks import KINDS, peak_of, peaks_of
from lit_llm.core.errors import UserError
from lit_llm.core.memory import memory_bytes
from lit_llm.core.yaml_reading import read_yaml_file

TABLE = Path(__file__).with_name("hardware.yaml")


@dataclass(frozen=True)
class Hardware:
    """One kind of device. Unknown figures are None. Units: TFLOP/s, GB = 1e9 bytes, GB/s, USD per hour.

    Attributes:
        peak_tflops: dense peak for "bf16" (and fp16), "tf32", "fp32", "fp8".
        compute_capability: major compute capability of an NVIDIA GPU. None: another device.
        node_gbps: bandwidth to another device of the same node, per device and direction.
        network_gbps: bandwidth to a device of another node, per device and direction.
    """

    name: str
    device_name: str
    source: str
    compute_capability: int | None
    peak_tflops: dict[str, float | None]
    memory_gb: float | None
    memory_gbps: float | None
    node_gbps: float | None
    network_gbps: float | None
    devices_per_node: int
    price_usd_hour: tuple[float, float] | None

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_gpu(self) -> bool:
        return not self.device_name.startswith("cpu")

    def multiplies(self, precision: str) -> bool:
        """Whether its matrix units, if any, multiply in a Trainer precision: those before Ampere lack bf16."""
        return not precision.startswith("bf16") or self.compute_capability is None or self.compute_capability >= 8

    def peak_for(self, precision: str, matmul_precision: str = "highest") -> float | None:
        """Dense matrix-product peak in TFLOP/s under a Trainer precision, or None if unknown.

        Args:
            matmul_precision: torch's float32_matmul_precision. On a GPU, any value but "highest" runs fp32 products in tf32.
        """
        if not self.multiplies(precision):
            return None
        return peak_of(self.peak_tflops, precision, matmul_precision if self.is_gpu else "highest")


@cache
def table() -> dict[str, Hardware]:
    """All devices of hardware.yaml, by name."""
    entries = read_yaml_file(TABLE).items()
    return {name: _device(name, {**entry, "peak_tflops": peaks_of(entry["device_name"])}) for name, entry in entries}


def _device(name: str, entry: dict[str, Any]) -> Hardware:
    price = entry["price_usd_hour"]
    return Hardware(**{"name": name, **entry, "price_usd_hour": None if price is None else (price[0], price[1])})


def from_file(path: Path) -> Hardware:
    """A user's own device: a YAML file with the keys of an entry of hardware.yaml and its peaks. It is called as the file.

    Raises:
        UserError: the file cannot be read, a key is unknown or missing, or a value is not of its kind.
    """
    flag = "(--hardware)"
    try:
        entry = read_yaml_file(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error} {flag}.") from None
    wanted = [field.name for field in fields(Hardware) if field.name != "name"]
    if not isinstance(entry, dict):
        raise UserError(f"{path} must have the keys {', '.join(wanted)} {flag}.")
    unknown, missing = [key for key in entry if key not in wanted], [key for key in wanted if key not in entry]
    if unknown or missing:
        lists = [("unknown", unknown), ("missing", missing)]
        said = " and ".join(f"{what} {', '.join(map(str, keys))}" for what, keys in lists if keys)
        raise UserError(f"{path} has {said}; its keys are {', '.join(wanted)} {flag}.")
    for key, value in entry.items():
        if not _is_valid(key, value):
            raise UserError(f"{path}: {key} is {value!r}, but must be {_KINDS.get(key, 'a number above 0, or null')} {flag}.")
    return _device(path.stem, entry)


_KINDS = {
    "source": "a text",
    "device_name": "a text, cpu for processors",
    "compute_capability": "a whole number above 0, or null",
    "devices_per_node": "a whole number above 0",
    "peak_tflops": f"numbers above 0, or null, for {', '.join(KINDS)}",
    "price_usd_hour": "two numbers above 0, the lower one first, or null",
}


def _is_valid(key: str, value: Any) -> bool:
    def number(x: Any) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf

    if key in ("source", "device_name"):
        return isinstance(value, str) and bool(value)
    if key == "peak_tflops":
        return isinstance(value, dict) and set(value) == set(KINDS) and all(x is None or number(x) for x in value.values())
    if key == "devices_per_node":
        return isinstance(value, int) and number(value)
    if value is None:
        return True
    if key == "price_usd_hour":
        return isinstance(value, list) and len(value) == 2 and all(map(number, value)) and value[0] <= value[1]
    return number(value) and (key != "compute_capability" or isinstance(value, int))


def find(name: str) -> Hardware:
    """The device called `name`, or the one that a file `name` describes if it ends in .yaml or .yml.

    Raises:
        UserError: the device is not in the table. The message lists the known names, closest first. Or the file is wrong.
    """
    if name.endswith((".yaml", ".yml")):
        return from_file(Path(name))
    known = table()
    if name in known:
        return known[name]
    wanted = name.lower()

    def distance(other: str) -> tuple[bool, float]:
        return not other.startswith(wanted), -difflib.SequenceMatcher(None, wanted, other).ratio()

    near = sorted(known, key=distance)
    raise UserError(
        f"Unknown hardware {name!r}. Use --hardware auto to measure this machine, a YAML file, or one of: {', '.join(near)}."
    )


# -- this machine -----------------------------------------------------------------------------------------------------

_SIZES = {"cpu": 2048, "cuda": 8192}


def this_machine(*, measure: bool, device: Any = None) -> Hardware:
    """This machine's device: its entry in the hardware table if there is one, else an entry without peaks.

    Args:
        measure: replace peaks and bandwidth by measured ones, which takes a few seconds.
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
    hardware = replace(known, memory_gb=memory_bytes(device) / 1e9, compute_capability=capability)
    if not measure:
        return hardware
    peaks = {"bf16": torch.bfloat16, "fp32": torch.float32}
    measured = {key: matmul_tflops(device, dtype) for key, dtype in peaks.items()}
    tf32 = None
    if device.type == "cuda":
        tf32 = matmul_tflops(device, torch.float32, precision="high")
    return replace(
        hardware,
        name=f"this machine ({platform.machine()})" if device.type == "cpu" else name,
        source="measured: square matrix products and a memory copy",
        peak_tflops={**measured, "tf32": tf32, "fp8": None},
        memory_gbps=copy_gbps(device),
    )


def matmul_tflops(device: Any, dtype: Any, *, precision: str = "highest") -> float:
    """Best of five products of square matrices, TFLOP/s."""
    import torch

    size = _SIZES[device.type]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty(size, size, device=device, dtype=dtype)
        return 2 * size**3 / fastest(lambda: torch.mm(a, b, out=out), device) / 1e12
    finally:
        torch.set_float32_matmul_precision(before)


def copy_gbps(device: Any) -> float:
    """Best of five copies of 256 MB, GB/s: bytes read and written."""
    import torch

    source = torch.ones(64_000_000, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / fastest(lambda: target.copy_(source), device) / 1e9


def fastest(work: Callable[[], Any], device: Any, times: int = 5) -> float:
    """Seconds of the fastest of `times` runs, after one to warm up."""
    import torch

    best = float("inf")
    for run in range(times + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if run:
            best = min(best, time.perf_counter() - start)
    return best

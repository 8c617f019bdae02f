"""The hardware table, `hardware.yaml`, as dataclasses."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lit_llm.errors import UserError
from lit_llm.yaml_reading import read_yaml_file

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

    def peak_for(self, precision: str, matmul_precision: str = "highest", *, float8: bool = False) -> float | None:
        """Dense matrix-product peak in TFLOP/s under a Trainer precision, or None if unknown.

        Args:
            matmul_precision: torch's float32_matmul_precision. On a GPU, any value but "highest" runs fp32 products in tf32.
        """
        if float8:
            return self.peak_tflops["fp8"]
        if precision.startswith(("bf16", "16")):
            return self.peak_tflops["bf16"]
        if precision == "32-true":
            return self.peak_tflops["fp32" if matmul_precision == "highest" or not self.is_gpu else "tf32"]
        return None


@cache
def table() -> dict[str, Hardware]:
    """All devices of hardware.yaml, by name."""
    entries = read_yaml_file(TABLE)
    found = {}
    for name, entry in entries.items():
        price = entry.pop("price_usd_hour")
        found[name] = Hardware(name=name, price_usd_hour=None if price is None else (price[0], price[1]), **entry)
    return found


def find(name: str) -> Hardware:
    """The device called `name`.

    Raises:
        UserError: the device is not in the table. The message lists the known names, closest first.
    """
    known = table()
    if name in known:
        return known[name]
    wanted = name.lower()

    def distance(other: str) -> tuple[bool, float]:
        return not other.startswith(wanted), -difflib.SequenceMatcher(None, wanted, other).ratio()

    near = sorted(known, key=distance)
    raise UserError(f"Unknown hardware {name!r}. Use --hardware auto to measure this machine, or one of: {', '.join(near)}.")

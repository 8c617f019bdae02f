"""Measure this machine: matrix-product peak, memory bandwidth and capacity. torch is imported on first use."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lit_llm.core.memory import memory_bytes
from lit_llm.plan.hardware import Hardware, table

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

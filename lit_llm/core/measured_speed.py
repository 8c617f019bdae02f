"""The speed of this machine's device, measured with square matrix products and memory copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_SIZES = {"cpu": 2048, "cuda": 8192}


def matmul_tflops(device: Any, dtype: Any, *, precision: str = "highest") -> float:
    """TFLOP/s of the fastest of five products of square matrices. `precision`: torch's float32_matmul_precision."""
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
    """GB/s of the fastest of five copies of 256 MB within the device's memory: bytes read plus bytes written."""
    import torch

    source = torch.ones(64_000_000, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / fastest(lambda: target.copy_(source), device) / 1e9


def fastest(work: Callable[[], Any], device: Any) -> float:
    """Seconds of the fastest of five runs of `work` on a device, after one run to warm up."""
    import torch

    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])

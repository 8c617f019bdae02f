"""Memory: of a device or this machine, the sizes of temporary buffers, and Python's garbage. torch is imported on first use.

The code that allocates a buffer and the planner that counts it share its size.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MUON_BATCH_NUMEL = 2**24
"""Elements of the matrices that a rank orthogonalises in one turn of Muon (and that Lion updates together)."""

SOFTMAX_NUMEL = 2**23
"""Logits that the chunked loss holds in the sum's dtype at a time (32 MiB in float32)."""

_CGROUP, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")


def memory_bytes(device: Any) -> int:
    """Memory of a GPU; for other devices that of the machine, or what a container may use of it. Processes share the latter."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int((_CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return physical


def free_host_bytes() -> int:
    """Memory that processes of this machine, or of this container if it has a limit, can still take without swapping."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        parts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(0, min(free, limit - used + int(parts["inactive_file"])))  # the page cache is given back
    except (OSError, ValueError, KeyError):  # no cgroup, or "max"
        return free


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Within it, Python does not search for cycles of objects that nobody uses."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

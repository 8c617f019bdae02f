"""Memory of a GPU, or of this machine. torch is imported on first use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(device: Any) -> int:
    """Memory of a GPU; for other devices that of the machine, or what a container may use of it. Processes share the latter."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return physical

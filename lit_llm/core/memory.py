"""Memory of a device or machine, sizes of temporary buffers, and Python's garbage collection. torch is imported on first use.

The code that allocates a buffer and the planner that counts it share its size.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COPY_FRACTION = 0.5
"""Share of the free host memory that copies of checkpoints may take: data loaders and the page cache need some, too."""
MUON_BATCH_NUMEL = 2**24
"""Most elements that several matrices together have in one turn of Muon on a rank, or in one update of Lion."""

SOFTMAX_NUMEL = 2**23
"""Most logits of which the chunked loss computes the softmax at a time, in float32 (32 MiB) or a wider dtype."""

_CGROUPS, _GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def memory_bytes(device: Any) -> int:
    """Bytes of a GPU's memory. For other devices, bytes of the machine or of the container's limit, which processes share."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(limit for _, limit in cgroup_limits())])


def cgroup_limits() -> list[tuple[Path, int]]:
    """Folder and bytes of each memory limit of this process: the limits of its control group and of the groups above it.

    Empty without limits. Reads both versions of cgroups. In a container, the container's own group is at the top.
    """
    try:
        lines = _GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        top, name = (_CGROUPS, "memory.max") if not controllers else (_CGROUPS / "memory", "memory.limit_in_bytes")
        group = top / path.lstrip("/")
        for folder in (group, *(above for above in group.parents if above.is_relative_to(top))):
            with contextlib.suppress(OSError, ValueError):  # the file is hidden from a container, or has "max"
                limits.append((folder, int((folder / name).read_text())))
    return limits


def address_space_bytes() -> float:
    """Bytes of address space that one process may map (ulimit -v); infinity without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def free_host_bytes() -> int:
    """Bytes that processes of this machine, or of this container if it has a limit, can still take without swapping."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for folder, limit in cgroup_limits():
        with contextlib.suppress(OSError, ValueError, KeyError):
            usage = "memory.current" if (folder / "memory.current").exists() else "memory.usage_in_bytes"
            used = int((folder / usage).read_text())
            parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            page_cache = int(parts.get("total_inactive_file", parts["inactive_file"]))  # the kernel frees it when needed
            free = min(free, limit - used + page_cache)
    return max(0, free)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A context in which Python's garbage collector does not search for cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

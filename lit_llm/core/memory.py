"""Memory of a device or machine, sizes of temporary buffers, and Python's garbage collection. torch is imported on first use.

The planner and the code that allocates a temporary buffer take the buffer's size from here.
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
"""Largest share of the free host memory that copies of checkpoints take: data loaders and the page cache need memory, too."""
MUON_BATCH_NUMEL = 2**24
"""Largest total number of elements of several matrices that Muon on a rank, or Lion, updates at the same time."""

SOFTMAX_NUMEL = 2**23
"""Largest number of logits whose softmax the chunked loss computes at a time, in float32 (32 MiB) or a wider dtype."""

_CGROUPS, _GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def memory_bytes(device: Any) -> int:
    """Bytes of a GPU's memory. For other devices: bytes of the machine's memory or of the container's limit, the smaller."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(limit for _, limit in cgroup_limits())])


def cgroup_limits() -> list[tuple[Path, int]]:
    """(folder, limit in bytes) for each memory limit of this process's control group and of the groups above this group.

    Empty without limits. Reads cgroups v1 and v2. In a container, the container's own group is at the top.
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
    """Bytes of memory that processes of this machine, or of a container with a limit, can still allocate without swapping."""
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
    """Context manager in which Python's garbage collector does not run (`gc.disable`)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

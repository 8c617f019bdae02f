"""Free host memory, for the copies of checkpoints that are saved in the background."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lit_llm.core.memory import cgroup_limits

_MEMINFO = Path("/proc/meminfo")


def free_host_bytes() -> int:
    """Memory that processes of this machine, or of this container if it has a limit, can still take without swapping."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for folder, limit in cgroup_limits():
        with contextlib.suppress(OSError, ValueError, KeyError):
            usage = "memory.current" if (folder / "memory.current").exists() else "memory.usage_in_bytes"
            used = int((folder / usage).read_text())
            parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, limit - used + int(parts["inactive_file"]))  # the page cache is given back
    return max(0, free)

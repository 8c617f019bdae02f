"""Free host memory, for the copies of checkpoints that are saved in the background."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


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

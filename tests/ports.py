"""Free TCP ports for groups of processes that tests start."""

from __future__ import annotations

import itertools
import os
import random
import re
import socket

FIRST, PORTS_PER_WORKER = 10_000, 1_000  # below 32768, where Linux takes the ports of outgoing connections from
_worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0) % 20
_offsets = itertools.count(random.SystemRandom().randrange(PORTS_PER_WORKER))  # so that two test runs rarely meet


def free_port() -> int:
    """A port nobody listens on. Each pytest-xdist worker has its own range, so that two workers never get the same one."""
    for offset in itertools.islice(_offsets, PORTS_PER_WORKER):
        port = FIRST + _worker * PORTS_PER_WORKER + offset % PORTS_PER_WORKER
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"No free port among the {PORTS_PER_WORKER} of test worker {_worker}.")

"""Kill a command again and again until it ends by itself."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import fork_server


def count_files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def run_with_kills(start: Callable[[], fork_server.Popen], out: Path, draw: random.Random, most: int) -> int:
    """Start a process group, and SIGKILL it when it has made 1 to ``most`` files in ``out``, until it ends with 0.

    Returns:
        the number of kills.
    """
    kills = 0
    while True:
        process = start()
        files = count_files(out) + draw.randint(1, most)
        while process.poll() is None and count_files(out) < files:
            time.sleep(0.003)
        if process.poll() is not None:
            assert process.returncode == 0
            return kills
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1

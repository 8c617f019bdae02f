"""Undo what a command sets for its whole process, so that the order of tests does not matter."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch  # noqa: F401  # sets the log levels that are recorded here

LOG_LEVELS = {name: logging.getLogger(name).level for name in ("lightning.fabric", "lightning.pytorch")}
SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
"""Set by seed_everything. Processes that are started later would seed with them."""


@contextmanager
def restored_process_state() -> Iterator[None]:
    """At the end, also after an exception: Lightning's initial log levels, and no seed in the environment."""
    try:
        yield
    finally:
        for name, level in LOG_LEVELS.items():
            logging.getLogger(name).setLevel(level)
        for name in SEED_VARIABLES:
            os.environ.pop(name, None)

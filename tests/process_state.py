"""Undo what a command sets for its whole process, so that the order of tests does not matter."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch  # noqa: F401  # sets the log levels that are recorded here
import torch.distributed as dist

LOG_LEVELS = {name: logging.getLogger(name).level for name in ("lightning.fabric", "lightning.pytorch")}
LEFT_BY_LIGHTNING = (
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
    *("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Set by seed_everything, and by DDP, also on one process. A process that is started later would take that seed, or wait for
the other ranks of a group that does not exist."""


@contextmanager
def restored_process_state() -> Iterator[None]:
    """At the end, also after an exception: Lightning's initial log levels, the environment as it was, and no process group.

    What Lightning leaves is removed in any case: a fixture of a module may have set it before. It never ends the process
    group of a strategy on one process, and a test that forks a rank would inherit it.
    """
    environment = dict(os.environ)
    try:
        yield
    finally:
        for name, level in LOG_LEVELS.items():
            logging.getLogger(name).setLevel(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for name in LEFT_BY_LIGHTNING:
            os.environ.pop(name, None)
        if dist.is_initialized():
            dist.destroy_process_group()

"""Undo what a command sets for its whole process, so that the order of tests does not matter."""

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch  # noqa: F401  # sets the log levels that are recorded here
import torch.distributed as dist

import lit_llm.config.parse

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


def share_parsers() -> None:
    """From now on this process makes the parser of a command once: that takes as long as parsing, which leaves it as it is."""
    make = lit_llm.config.parse.make_parser
    once = functools.cache(make)
    lit_llm.config.parse.make_parser = lambda command, defaults: make(command, defaults) if defaults else once(command)
    once("fit")
    remember_arguments()


def remember_arguments() -> None:
    """jsonargparse searches the list of all arguments for each key anew, which is a fifth of parsing."""
    name = "find_action_and_subcommand"
    modules = [m for path, m in sys.modules.items() if path.startswith("jsonargparse.") and name in vars(m)]
    for find in {getattr(module, name) for module in modules}:  # one, unless this has been called already

        def found(parser, dest, exclude=None, find=find):
            known = vars(parser).setdefault("_known", {})
            key = id(parser), id(parser._actions), len(parser._actions), dest, exclude
            if key not in known:
                known[key] = find(parser, dest, exclude)
            return known[key]

        for module in modules:
            setattr(module, name, found)

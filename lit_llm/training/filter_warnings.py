"""Hides warnings and messages of Lightning and torch that do not concern users of lit_llm."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import lightning

_WARNINGS = (
    ".*LeafSpec.* is deprecated",  # Lightning uses a deprecated part of torch
    ".*`broadcast_buffers` is deprecated",  # as above
    ".*does not have many workers",  # reading samples costs less than a worker process
    ".*sync_dist=True",  # lit_llm has already summed over all ranks
    ".*smaller than the logging interval",  # step 1 is always logged
    "Mismatch dtype between input and weight",  # norms have fp32 gains on purpose
    ".*but have no logger configured",  # evaluating writes no curves
    ".*callbacks used to create the checkpoint need to be provided",  # evaluating needs none
)


_LIGHTNING = Path(lightning.__file__).parent


def filter_warnings() -> None:
    """Hide the warnings of `_WARNINGS` in the whole process, and Lightning's messages about the seed and the devices."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Callbacks write to the same logger as Lightning.
    shared = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    shared.setLevel(logging.INFO)
    shared.addFilter(_is_of_a_callback)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # for authors of meshes


def _is_of_a_callback(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or _LIGHTNING not in Path(record.pathname).parents

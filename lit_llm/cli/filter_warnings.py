"""What Lightning and torch say at a start and no user needs to read: switched off, each with its reason."""

from __future__ import annotations

import logging
import warnings

_WARNINGS = (
    ".*LeafSpec.* is deprecated",  # between Lightning and torch
    ".*does not have many workers",  # the order of samples costs less than a worker process
    ".*sync_dist=True",  # our sums are over all ranks already
    ".*smaller than the logging interval",  # step 1 is always logged
    "Mismatch dtype between input and weight",  # norms with fp32 gains, as wanted
    ".*but have no logger configured",  # evaluating writes no curves
    ".*callbacks used to create the checkpoint need to be provided",  # likewise
)


def filter_warnings() -> None:
    """For the whole process. "Seed set to" and the list of devices would be the first thing a newcomer reads."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # advice on meshes, not for users

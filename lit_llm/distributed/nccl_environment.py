"""What NCCL's process groups write when a collective times out: variables of torch 2.13, unless the user has set them."""

from __future__ import annotations

import os
from pathlib import Path


def record_collectives(folder: Path) -> None:
    """Before the processes connect: keep the latest collectives, and write them to `folder`, which exists then, on a timeout.

    torch then says which rank, group and collective timed out, and `folder/nccl-rank-N` has the record of rank N, for
    `python -m torch.distributed.flight_recorder.fr_trace`.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    for name, older, value in (  # torch reads the first of the two that is set
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder.absolute() / "nccl-rank-")),
    ):
        if older not in os.environ:
            os.environ.setdefault(name, value)

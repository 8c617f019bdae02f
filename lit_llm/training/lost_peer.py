"""The end of other processes of the run: its errors, and what lets others notice it. `progress_watch` watches them.

gloo has no exception type for a lost connection: it raises a plain RuntimeError. So `is_lost_peer` tests the message. No other
function does. Its test kills a real process and uses the real error.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import torch.distributed as dist

from lit_llm.core._lightning import is_rank_zero

# Messages of a read or write on a TCP connection closed by the other end (gloo/transport/tcp/pair.cc, errno's texts).
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
RELEASE = 5.0
"""Seconds in which the other processes find out that rank 0 has failed before they were connected."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is gloo's error for a lost connection to another process, or that of the store of the process group.

    NCCL does not raise one: its watchdog ends the process.
    """
    if isinstance(error, dist.DistNetworkError):
        return not is_port_in_use(error)
    message = str(error)
    return isinstance(error, RuntimeError) and "gloo/transport" in message and any(text in message for text in _LOST)


def is_port_in_use(error: BaseException) -> bool:
    """Whether `error` says that rank 0 cannot listen on MASTER_PORT, because another process does."""
    return isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error)


def release_waiting_ranks() -> None:
    """For rank 0 that fails before the processes are connected, for example because it refuses the settings.

    The others wait for its store, up to half an hour. They get a store, and lose it again. With torchrun, its agent has the
    store, and ends them. Lightning starts them later. Other launchers say with variables where the store is.
    """
    if not is_rank_zero() or "TORCHELASTIC_USE_AGENT_STORE" in os.environ or dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError, KeyError):  # no address, or the port is in use
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
        time.sleep(RELEASE)
        del store


def record_collectives(folder: Path) -> None:
    """Make NCCL's process groups write their latest collectives to `folder`, which exists then, when one times out.

    Call it before the processes connect. It sets variables of torch 2.13, unless the user has set them.
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

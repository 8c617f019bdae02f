"""The end of other processes of the run: its errors, and the record that NCCL leaves. `progress_watch` watches them.

gloo has no exception type for a lost connection: it raises a plain RuntimeError. So `is_lost_peer` tests the message. No other
function does. Its test kills a real process and uses the real error.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

from lit_llm.training import bounded_exit

# Messages of a read or write on a TCP connection closed by the other end (gloo/transport/tcp/pair.cc, errno's texts).
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


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


def launched_rank_ended(rank: int, code: int) -> None:
    """Called in a thread when a rank that this process launched has ended: end this one, unless it does so by itself.

    A rank that fails once the processes are connected says so (`progress_watch`), and all ranks may come to an end with a code.
    """
    if code == 0 or (code > 0 and dist.is_initialized()):
        return
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    os.write(2, f"error: rank {rank} {how}\n".encode())
    time.sleep(bounded_exit.SECONDS)
    bounded_exit.end(1, f"error: this process waited for rank {rank}, and is ended now")


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

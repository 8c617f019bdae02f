"""Recognises, by errors and exit codes, that another process of the run has ended. Makes NCCL record its collectives.

gloo has no exception type for a lost connection: it raises a plain RuntimeError. So `is_lost_peer`, and no other function,
tests the message. Its unit test kills a process to get gloo's real error. `progress_watch` watches running processes.
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
    """Whether `error` is gloo's error for a lost connection to another process, or to the store of the process group.

    NCCL raises no error for a lost connection: its watchdog ends the process.
    """
    if isinstance(error, dist.DistNetworkError):
        return not is_port_in_use(error)
    message = str(error)
    return isinstance(error, RuntimeError) and "gloo/transport" in message and any(text in message for text in _LOST)


def is_port_in_use(error: BaseException) -> bool:
    """Whether `error` says that rank 0 cannot listen on MASTER_PORT, because another process listens there."""
    return isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error)


def launched_rank_ended(rank: int, code: int) -> None:
    """If a launched rank was killed, or failed before the processes connected, end this process too. Runs in a thread.

    The main thread gets `bounded_exit.SECONDS` to end by itself first. Does nothing if the rank ended with code 0, or failed
    after the processes had connected: the rank then reports its failure (`progress_watch`), or all ranks end with this code.

    Args:
        code: the rank's exit code, or, if a signal killed the rank, the negative number of the signal.
    """
    if code == 0 or (code > 0 and dist.is_initialized()):
        return
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    os.write(2, f"error: rank {rank} {how}\n".encode())
    time.sleep(bounded_exit.SECONDS)
    bounded_exit.end(1, f"error: this process waited for rank {rank}, and is ended now")


def record_collectives(folder: Path) -> None:
    """Make NCCL's process groups write their latest collectives to `folder` (which must exist) when a collective times out.

    Call this before the processes connect. It sets environment variables that the user has not set. torch then prints which
    rank, group and collective timed out; `python -m torch.distributed.flight_recorder.fr_trace` reads `folder/nccl-rank-N`.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / "nccl-rank-"))

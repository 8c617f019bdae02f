"""The end of other processes of the run: gloo's error for it, and what ends a process that gets none.

gloo has no exception type for a lost connection: it raises a plain RuntimeError. So `is_lost_peer` tests the message. No other
function does. Its test kills a real process and uses the real error.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_llm.core._lightning import is_rank_zero

# Messages of a read or write on a TCP connection closed by the other end (gloo/transport/tcp/pair.cc, errno's texts).
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
INTERVAL = 5.0
"""Seconds between two looks for a failed process."""
PATIENCE = 20.0
"""Seconds that a process has to end by itself once another one has failed."""
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


class PeerWatch(Callback):
    """Ends this process when another one of the run has failed, and this one does not notice.

    Usually it does: gloo's next collective raises. It does not while processes connect, with NCCL, or where the failed
    process cannot end. So a process that fails says so in the store of the process group, and each process looks there in
    a thread, over a connection of its own: the other one is locked while the process waits.

    Contract:
        setup: connects and starts the thread, with several processes. A collective.
        on_exception: tells the others. This process now ends by itself.
        teardown: stops the thread.
        State: none.

    Put it before other callbacks.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._store: dist.Store | None = None
        self._key = ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        self._key = trainer.strategy.broadcast(uuid.uuid4().hex)  # a store may outlive a run, as torchrun's does
        with contextlib.suppress(RuntimeError, KeyError):  # the group was made without a TCP store
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = dist.TCPStore(address, port, timeout=timedelta(seconds=30), wait_for_workers=False)
            self._ended = threading.Event()
            watch = threading.Thread(target=_watch, args=(self._store, self._key, self._ended), name="peer-watch", daemon=True)
            watch.start()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._ended.set()
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the process that has the store is gone
                self._store.set(self._key, str(trainer.global_rank))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._ended.set()
        self._store = None


def _watch(store: dist.Store, key: str, ended: threading.Event) -> None:
    failed = False
    while not failed:
        if ended.wait(INTERVAL):
            return
        try:
            failed = store.check([key])
        except RuntimeError:  # the process that has the store is gone
            failed = True
    if not ended.wait(PATIENCE):
        os.write(2, b"error: another process of this run has failed, and this one waited for it: it ends now\n")
        os._exit(1)


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

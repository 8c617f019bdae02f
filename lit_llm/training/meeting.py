"""Checks, before the ranks of a run connect, that every rank has started, no rank has failed, and their settings are equal.

The ranks write into the TCPStore through which torch's process group connects. Rank 0 writes the verdict: a list of errors with
which every rank ends, or an empty list. A rank that fails earlier writes a verdict, too, so that no rank waits half an hour.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lit_llm.callbacks._torch import gathered
from lit_llm.core.errors import UserError, refuse, report
from lit_llm.core.ranks import has_agent_store, is_first_here, is_rank_zero, is_slurm, launched_ranks, rank_name, restarts
from lit_llm.core.yaml_reading import as_flag
from lit_llm.training.bounded_exit import LAUNCHER

TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other: as long as torch's process groups."""
FAILED_RANK = timedelta(seconds=60)
"""How long a failed rank tries to connect to rank 0, to report its failure."""
RELEASE = 10.0
"""Longest time, in seconds, for which rank 0 waits for the other ranks to read the verdict that ends the run."""
ANNOUNCED = 10.0
"""Seconds after which rank 0 prints that it still waits for ranks."""
_INTERVAL = 0.05
_VERDICT = "verdict"
_meetings = itertools.count()
_ended = False


def meet(trainer: Trainer, settings: Mapping[str, str]) -> dist.Store | None:
    """Wait until all ranks have started, and compare their settings. If the ranks are connected already, do nothing.

    Args:
        settings: the settings that must be the same on all ranks, by key (`same_on_all_ranks`).

    Returns:
        The store; None if the ranks were connected before. Rank 0 must keep the store: deleting it closes it for all ranks.

    Raises:
        UserError: A rank has failed, has not started, or has other settings. Every rank raises this error.
    """
    global _ended
    if dist.is_initialized():
        return None
    rank, ranks, environment = trainer.global_rank, trainer.world_size, trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    os.environ.pop(LAUNCHER, None)  # launched ranks have a copy; processes that start later are no ranks
    store = _open(rank == 0, TIMEOUT)
    store.set(f"settings of {rank}", json.dumps(settings))
    if rank == 0:
        _judge(store, [f"settings of {each}" for each in range(ranks)])
    while not store.check([_VERDICT]):
        time.sleep(_INTERVAL)
    _ended = True
    problems = json.loads(store.get(_VERDICT))
    if problems and rank == 0:
        _wait_for_readers(store, ranks)
    store.add("read", 1)
    refuse(problems)
    return store


def tell_failure(error: Exception) -> None:
    """Call this on a rank that fails: if `meet` has not ended on it, all other ranks will end with the message of `error`."""
    if _ended or dist.is_initialized():
        return
    said = str(error) if isinstance(error, UserError) else repr(error)
    lines = [f"{rank_name()}: {line}" for line in said.splitlines()]
    try:
        if is_slurm():
            environment = SLURMEnvironment(auto_requeue=False)
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        store = _open(is_rank_zero(), FAILED_RANK)
        store.compare_set(_VERDICT, "", json.dumps(lines))
        if is_rank_zero():
            _wait_for_readers(store, launched_ranks() or 2)
        store.add("read", 1)
    except (RuntimeError, KeyError):  # no address, the port is in use, or rank 0 has not come
        if not is_first_here():  # the first rank on this machine prints its own errors anyway
            print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)


def _open(hosts: bool, timeout: timedelta) -> dist.Store:
    """Connect to the TCPStore at MASTER_ADDR:MASTER_PORT and return it. Each call prefixes its keys differently, because a
    process may train several times.

    Args:
        hosts: whether this rank is the store's server. Ignored if torchrun's agent is the server.
        timeout: how long to try to connect.
    """
    hosts = hosts and not has_agent_store()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    return dist.PrefixStore(f"meeting {restarts()}.{next(_meetings)}", store)


def _wait_for_readers(store: dist.Store, ranks: int) -> None:
    """On rank 0, unless torchrun hosts the store: wait until other ranks have read the verdict, at most `RELEASE` seconds."""
    until = time.monotonic() + RELEASE
    while not has_agent_store() and store.add("read", 0) < ranks - 1 and time.monotonic() < until:
        time.sleep(_INTERVAL)


def _judge(store: dist.Store, keys: list[str]) -> None:
    """On rank 0: wait for the settings of all ranks, compare them, and write the verdict, unless a failed rank has written one.

    Args:
        keys: for each rank, the key in the store under which the rank writes its settings.
    """
    began, said = time.monotonic(), False
    while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
        if store.check([_VERDICT]):
            return
        waited, which = time.monotonic() - began, ", ".join(map(str, missing[:10]))
        if waited > ANNOUNCED and not said:
            said, where = True, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            report(f"rank 0 waits at {where} for {len(missing)} of {len(keys)} ranks to start: {which}", kind="note")
        if waited > TIMEOUT.total_seconds():
            late = f"{len(missing)} of {len(keys)} ranks did not start within {TIMEOUT}, such as {which}: see their output"
            store.compare_set(_VERDICT, "", json.dumps([late]))
        time.sleep(_INTERVAL)
    problems = _differences([json.loads(text) for text in store.multi_get(keys)])
    store.compare_set(_VERDICT, "", json.dumps(problems))


def refuse_other_data(state: Mapping[str, Any]) -> None:
    """Compare the state dicts of all ranks' data modules, whose data are open: all ranks must read the same data. A collective.

    Args:
        state: the state dict of this rank's TokenDataModule.

    Raises:
        UserError: The settings that decide the samples differ between ranks. Every rank raises this error.
    """
    # A teacher's file belongs to the shards; other ranks open it later.
    deciding = {f"data.{name}": value for name, value in state.items() if name not in ("files", "teacher")}
    if any(each != deciding for each in gathered(deciding)):
        files = {f"data file {os.path.basename(path)}": blake2b for path, (_, blake2b) in state.get("files", {}).items()}
        refuse(_differences(gathered(deciding | files)))


def _differences(of_ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence for each key whose value on some rank differs from the value on rank 0.

    Args:
        of_ranks: for each rank, key → value of its settings.
    """
    ours, differences = of_ranks[0], dict[str, str]()
    for rank, theirs in enumerate(of_ranks):
        # Keys that one rank lacks follow from the choice of another class: they are named only if no value differs.
        keys = [key for key in ours if key in theirs and theirs[key] != ours[key]] or sorted(ours.keys() ^ theirs.keys())
        for key in keys:
            mine, other = (as_flag(each[key]) if key in each else "missing" for each in (ours, theirs))
            differences.setdefault(key, f"{key} is {mine} on rank 0 and {other} on rank {rank}: all ranks need the same")
    return list(differences.values())

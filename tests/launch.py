"""Starts a script in several processes, like torchrun, and collects their reports.

A test calls `run_ranks`; the script calls ``from launch import report`` and `report` at its end.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fork_server
import torch
import torch.distributed as dist
from ports import free_port

HERE = Path(__file__).resolve().parent


def run_ranks(
    script: Path | str,
    ranks: int,
    folder: Path,
    *arguments: object,
    timeout: float = 600,
    popen: type[fork_server.Popen | subprocess.Popen[bytes]] = fork_server.Popen,
) -> list[dict[str, Any]]:
    """Run `script` in `ranks` processes on this machine; returns their reports in rank order.

    Each process has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free one) in its environment. That is enough
    for ``torch.distributed.init_process_group("gloo")`` and for a Trainer with ``devices=ranks``. It has one OpenMP thread, and
    can import the tests' folders, the repository and the script's folder. Its output goes to ``folder/rank-R.log``.
    PL_GLOBAL_SEED, which ``seed_everything`` in an earlier test sets, is removed: Lightning's strategies for several processes
    would use it to override the script's seed.

    Args:
        script: the path of a script, or the source of one (str), which is then written into `folder`.
        folder: an existing folder, the processes' working directory; reports of an earlier run in it are removed.
        arguments: ``sys.argv[1:]`` of every process, as str.
        timeout: seconds for all of them together.
        popen: `subprocess.Popen` for processes that import everything themselves.

    Raises:
        AssertionError: a process failed (the others are killed), the time is up (all are killed), or a process ended without a
            report. The message has the end of their output.
    """
    if isinstance(script, str):
        source, script = script, folder / "script.py"
        script.write_text(source)
    for old in folder.glob("report-*.pt"):
        old.unlink()
    port = free_port()
    folders = [HERE, HERE / "distributed", HERE / "callbacks", HERE.parent]
    path = os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))
    common = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": path}
    inherited = {key: value for key, value in os.environ.items() if key not in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    command = [sys.executable, str(script.resolve()), *map(str, arguments)]
    processes: list[Any] = []
    deadline = time.monotonic() + timeout
    try:
        for rank in range(ranks):
            own = {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            with open(folder / f"rank-{rank}.log", "wb") as log:
                processes.append(  # a separate session, so that its workers are killed with it
                    popen(command, env={**inherited, **own}, cwd=folder, stdout=log, stderr=log, start_new_session=True)
                )
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > deadline:
                logs = "\n".join(_log(folder, rank, code) for rank, code in enumerate(codes))
                raise AssertionError(f"no end after {timeout} s\n{logs}")
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert not any(codes), "\n".join(_log(folder, rank, code) for rank, code in enumerate(codes))
    silent = [rank for rank in range(ranks) if not (folder / f"report-{rank}.pt").exists()]
    assert not silent, "no report\n" + "\n".join(_log(folder, rank, codes[rank]) for rank in silent)
    return [torch.load(folder / f"report-{rank}.pt", weights_only=True) for rank in range(ranks)]


def report(**values: Any) -> None:
    """In the script: set the value that `run_ranks` returns for this rank (tensors and plain values). The last call counts."""
    torch.save(values, f"report-{os.environ['RANK']}.pt")
    atexit.unregister(_take_leave)
    atexit.register(_take_leave)


def _take_leave() -> None:
    # Without this, the process occasionally aborts at the interpreter's exit.
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _log(folder: Path, rank: int, code: int | None) -> str:
    ended = "killed" if code is None else f"exit code {code}"
    return f"rank {rank}, {ended}:\n" + (folder / f"rank-{rank}.log").read_text(errors="replace")[-6000:]

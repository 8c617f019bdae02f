"""The rank processes of a check: forks of this process, which has imported what they need. It must not have used a GPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lit_llm.core.errors import UserError

Job = dict[str, Any]
"""`do`, a key of `_work`'s table, and arguments of that function."""
_GRACE = 60.0
"""Seconds that the job under way may take when the time is over."""


def run_ranks(folder: Path, ranks: int, jobs: dict[str, Job], seconds: float) -> tuple[dict[str, dict[str, Any]], str]:
    """Results of rank 0 by job, or of a rank on which the job failed, and why a process ended by itself ("": none did).

    A result has `found`, `refused` (a UserError) or `failed`. Jobs for which the time does not suffice have none.
    """
    from lit_llm.certify.training import write_text  # imports torch and Lightning once, here, instead of in each process

    write_text(folder)
    for old in folder.glob("results-*.jsonl"):
        old.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = [_fork(folder, rank, ranks, port, jobs, seconds) for rank in range(ranks)]
    codes: dict[int, int] = {}
    try:
        until = time.monotonic() + seconds + _GRACE
        while len(codes) < ranks and not any(codes.values()) and time.monotonic() < until:
            time.sleep(0.02)
            for pid in pids:
                if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(ended[1])
    finally:
        for pid in pids:
            if pid not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    found = _results(folder)
    return found, next((_end(folder, pids.index(pid), code) for pid, code in codes.items() if code), "")


def _fork(folder: Path, rank: int, ranks: int, port: int, jobs: dict[str, Job], seconds: float) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()  # a terminal's Ctrl-C reaches the command alone, which ends this process
        log = open(folder / f"rank-{rank}.log", "w", buffering=1)  # noqa: SIM115  # until the process ends
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        for name in [each for each in os.environ if each.startswith(("TORCHELASTIC_", "PL_GLOBAL_SEED", "SLURM_"))]:
            del os.environ[name]
        os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        _work(folder, rank, ranks, jobs, time.monotonic() + seconds)
        code = 0
    except BaseException:
        traceback.print_exc()
    _leave(code)


def _leave(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)  # exit handlers are those of the command


def _work(folder: Path, rank: int, ranks: int, jobs: dict[str, Job], deadline: float) -> None:
    """Run jobs one after another, while there is time. The ranks agree about it."""
    import torch
    import torch.distributed as dist

    from lit_llm.certify import attention, links, training

    does: dict[str, Callable[..., Any]] = {
        **{"train": training.train, "attention": attention.error, "links": links.links, "disk": links.disk},
        **{"loader": links.loader, "device": training.gpu},
    }
    torch.set_num_threads(1)
    for name, job in jobs.items():
        options = {key: value for key, value in job.items() if key != "do"}
        result: dict[str, Any] = {"name": name}
        try:
            result["found"] = does[job["do"]](folder, ranks=ranks, **options)
        except UserError as error:
            result["refused"] = str(error)
        except Exception as error:
            first = str(error).partition("\n")[0]
            _write(folder, rank, {**result, "failed": f"{type(error).__name__} on device {rank}: {first}"})
            raise
        _write(folder, rank, result)
        late = [time.monotonic() > deadline]
        if dist.is_initialized():
            dist.broadcast_object_list(late)
        if late[0]:
            return


def _write(folder: Path, rank: int, result: dict[str, Any]) -> None:
    with open(folder / f"results-{rank}.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    """What rank 0 wrote, or the rank on which a job failed; half-written lines are left out."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("results-*.jsonl")):
        for each in map(json.loads, path.read_text().rpartition("\n")[0].splitlines()):
            if path.name == "results-0.jsonl" or "failed" in each:
                found[each["name"]] = each
    return found


def _end(folder: Path, rank: int, code: int) -> str:
    if code < 0:
        return f"the process of device {rank} was ended by signal {-code}"
    last = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()
    return f"the process of device {rank} ended with exit code {code}: {last[-1] if last else 'no output'}"

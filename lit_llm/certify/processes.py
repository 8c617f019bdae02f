"""Start the rank processes of checks as forks of this process, which has imported torch and must not have used a GPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lit_llm.core.errors import UserError

Job = dict[str, Any]
"""A function call that all ranks make: `do` names a function in the table `does` of `_work`; other keys are its arguments."""
_GRACE = 60.0
"""Seconds for which the running job may continue after the deadline."""


def run_ranks(
    folder: Path, ranks: int, accelerator: str, jobs: dict[str, Job], seconds: float
) -> tuple[dict[str, dict[str, Any]], str]:
    """Run `jobs` in `ranks` new processes. Return ({job: result}, why a process ended by itself or "").

    A job's result comes from rank 0, or from a rank on which the job failed. It has the key `found` (value that the job
    returned), `refused` (text of a UserError) or `failed` (text of another error). A job without enough time has no result.
    """
    from lit_llm.certify.training import write_text  # imports torch and Lightning once, here, instead of in each process

    write_text(folder)
    for old in folder.glob("results-*.jsonl"):
        old.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deadline, address = time.monotonic() + seconds, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pids = []
    for rank in range(ranks):
        names = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank}
        environment = {name: str(value) for name, value in names.items()} | address
        pids.append(_fork(folder / f"rank-{rank}.log", environment, partial(_work, folder, accelerator, jobs, deadline)))
    codes: dict[int, int] = {}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # else ranks would outlive this process
    try:
        while len(codes) < ranks and not any(codes.values()) and time.monotonic() < deadline + _GRACE:
            time.sleep(0.02)
            for pid in pids:
                if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(ended[1])
    finally:
        signal.signal(signal.SIGTERM, before)
        for pid in pids:
            if pid not in codes:
                os.kill(pid, signal.SIGALRM)  # not SIGKILL: a process that something else has killed has another code
                if (code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) != -signal.SIGALRM:
                    codes[pid] = code  # this process was ending already; its peer only lost the connection
    results = _results(folder)
    if not (failed := {pid: code for pid, code in codes.items() if code}):
        return results, ""
    pid, code = min(failed.items(), key=lambda each: each[1])
    if code < 0:  # killed: the other processes fail only because their connection is gone
        results = {name: result for name, result in results.items() if "failed" not in result}
    return results, _end(folder, pids.index(pid), code)


def _fork(log: Path, environment: dict[str, str], work: Callable[[], None]) -> int:
    """Fork a process that calls `work`, and return the process id. Ctrl-C does not reach the process: the caller ends it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115  # until the process ends
        for descriptor in (1, 2):  # output of libraries
            os.dup2(sys.stdout.fileno(), descriptor)
        for name in [each for each in os.environ if each.startswith(("TORCHELASTIC_", "PL_GLOBAL_SEED", "SLURM_"))]:
            del os.environ[name]
        os.environ |= environment
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # skips exit handlers, which belong to the parent process


def _work(folder: Path, accelerator: str, jobs: dict[str, Job], deadline: float) -> None:
    """Run jobs one after another in this rank, and write each result to a file. After `deadline` by rank 0's clock, stop."""
    import torch
    import torch.distributed as dist

    from lit_llm.certify import links, training

    does: dict[str, Callable[..., Any]] = {"train": training.train, "gpu": training.gpu}
    does |= {"links": links.links, "disk": links.disk}
    torch.set_num_threads(1)
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))  # Lightning removes them when a training ends
    for name, job in jobs.items():
        options = {key: value for key, value in job.items() if key != "do"}
        result: dict[str, Any] = {"name": name}
        try:
            result["found"] = does[job["do"]](folder, ranks=ranks, accelerator=accelerator, **options)
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
    """Return {job: the result that rank 0 wrote, or the error that another rank wrote}. Incomplete lines are left out."""
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("results-*.jsonl")):
        for each in map(json.loads, path.read_text().rpartition("\n")[0].splitlines()):
            if path.name == "results-0.jsonl" or "failed" in each:
                results[each["name"]] = each
    return results


def _end(folder: Path, rank: int, code: int) -> str:
    if code < 0:
        return f"the process of device {rank} was ended by signal {-code}"
    last = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()
    return f"the process of device {rank} ended with exit code {code}: {last[-1] if last else 'no output'}"

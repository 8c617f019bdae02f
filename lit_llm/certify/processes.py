"""Starts the rank processes of a check, and collects what they found. No torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lit_llm.core.errors import UserError


def run_ranks(folder: Path, ranks: int, jobs: dict[str, Any], seconds: float) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Results of rank 0 by job, and why the processes ended early (None: they did not).

    Jobs that the seconds do not suffice for have no result. A job that is under way may take twice as long.
    """
    for old in folder.glob("results-*.jsonl"):
        old.unlink()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k not in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lit_llm.certify.training", str(folder), str(seconds)]
    processes = []
    try:
        for rank in range(ranks):
            with open(folder / f"rank-{rank}.log", "wb") as log:
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True))
        deadline = time.monotonic() + 2 * seconds + 60
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > deadline:
                return results(folder), None
            time.sleep(0.05)
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        return results(folder), None if failed is None else _end(folder, failed, codes[failed] or 0)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def results(folder: Path) -> dict[str, dict[str, Any]]:
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


def need(results: dict[str, dict[str, Any]], name: str) -> dict[str, float]:
    """The losses of a job that every comparison needs.

    Raises:
        UserError: It was not reached.
    """
    if "losses" not in results.get(name, {}):
        raise UserError("the budget is too small for one check: raise it (--budget)")
    return results[name]["losses"]

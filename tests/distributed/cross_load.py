"""Checkpoints of every layout and way of saving, and jobs that continue from them, for a test and a table.

`benchmarks/layouts.py cross` prints the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import layouts
from launch import run_ranks

SCRIPT = Path(layouts.__file__)
LAYOUTS: dict[int, dict[str, Any]] = {
    2: {
        "ddp": "ddp",
        "fsdp2": {"shard": 2},
        "tp": {"shard": 1, "tensor_parallel": 2},
        "cp": {"shard": 1, "context": 2},
        "pp": {"shard": 1, "pipeline": 2},
    },
    4: {"hsdp": {"replicate": 2, "shard": 2}, "fsdp2-tp": {"shard": 2, "tensor_parallel": 2}},
    8: {"3d": {"shard": 2, "tensor_parallel": 2, "pipeline": 2}},
}
"""By processes; beside them "single", one process without a strategy."""
COMMON = {"model": "modern", "optimizer": "MuonAdamW", "ema": 0.9}  # three parameter groups, two algorithms


def run(folder: Path, ranks: int, jobs: dict[str, dict[str, Any]], timeout: float = 400) -> list[dict[str, Any]]:
    """The report of each rank on `jobs` (arguments of `layouts.train`)."""
    (folder / "jobs.json").write_text(json.dumps({name: {**COMMON, **job} for name, job in jobs.items()}))
    return run_ranks(SCRIPT, ranks, folder, folder / "jobs.json", timeout=timeout)


def save_all(folder: Path, at: int, processes: Iterable[int] = LAYOUTS) -> dict[str, str]:
    """{name: folder of checkpoints}: one process, and every layout whole and in shards, of which half in the background.

    A name is that of the layout, followed by ", shards" where used.
    """
    places = {"single": "single"}
    layouts.train(folder, steps=at, to="single", **COMMON)
    for ranks in processes:
        jobs = {}
        for number, (name, strategy) in enumerate(LAYOUTS[ranks].items()):
            jobs[name] = {"strategy": strategy, "steps": at, "to": name}
            if name != "ddp":
                shards = {"to": f"{name}-shards", "sharded": True, "background": number % 2 == 0}
                jobs[f"{name}, shards"] = {**jobs[name], **shards}
        run(folder, ranks, jobs)
        places |= {name: job["to"] for name, job in jobs.items()}
    return places


def checkpoint(place: str, at: int) -> str:
    return f"{place}/step-{at:08d}.ckpt"


def moves(saved: dict[str, str], at: int, ranks: int, steps: int) -> dict[str, dict[str, Any]]:
    """{"source → layout": job}: every layout on `ranks` processes continues from every one of `saved` to `steps`."""
    return {
        f"{source} → {name}": {"strategy": strategy, "steps": steps, "resume": checkpoint(place, at)}
        for name, strategy in LAYOUTS[ranks].items()
        for source, place in saved.items()
    }

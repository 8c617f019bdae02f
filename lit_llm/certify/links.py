"""Speeds of links between devices, and of the disk."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lit_llm.checkpoint import disk_format

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
TIMES = 5


def dimensions(devices: int) -> dict[str, int]:
    """Of the mesh whose links are measured: name → size. Neighbours are `inner`, as ranks of tensor parallelism."""
    if devices == 1:
        return {}
    return {"outer": 2, "inner": devices // 2} if devices > 2 and devices % 2 == 0 else {"inner": devices}


def links(folder: Path, *, ranks: int, accelerator: str, mb: int) -> dict[str, float]:
    """GB/s that a device sends in each kind of collective along each dimension of a mesh; median of five."""
    dist.init_process_group("nccl" if accelerator == "cuda" else "gloo")
    sizes = dimensions(ranks)
    mesh = init_device_mesh(accelerator, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {
        f"{name}/{kind}": _gbps(kind, mesh.get_group(name), n, int(mb * 1e6 / 4) // n * n, mesh.device_type)
        for name, n in sizes.items()
        for kind in KINDS
    }


def _gbps(kind: str, group: dist.ProcessGroup, n: int, length: int, device: str) -> float:
    whole, part, other = (torch.ones(size, device=device) for size in (length, length // n, length))
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    taken = []
    for _ in range(TIMES + 1):
        begin = time.perf_counter()
        calls[kind]()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    sent = (2 if kind == "all_reduce" else 1) * (n - 1) / n * length * 4
    return sent / statistics.median(taken[1:]) / 1e9


def disk(folder: Path, *, ranks: int, accelerator: str, place: str, mb: int) -> dict[str, float]:
    """GB/s of writing a checkpoint (hashed, checked, on the disk), of a plain write with fsync, and of reading the first.

    Args:
        place: the folder whose disk is meant. Nothing stays there.
    """
    path, size = Path(place) / f".certify-{os.getpid()}", mb * 10**6
    content = {"state_dict": {"weight": torch.rand(size // 4)}, "global_step": 1}

    def fsync() -> None:
        with open(path, "wb") as file:
            file.write(bytes(size))
            os.fsync(file.fileno())

    ways = (("fsync", fsync), ("write", partial(disk_format.write, content, path)), ("read", partial(disk_format.read, path)))
    found = {}
    try:
        for name, work in ways:
            begin = time.perf_counter()
            work()
            found[name] = size / (time.perf_counter() - begin) / 1e9
    finally:
        disk_format.remove(path)
    return found

"""Jobs that measure the speeds of links between devices, and of the disk."""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lit_llm.checkpoint import disk_format

TIMES = 5


def dimensions(devices: int) -> dict[str, int]:
    """Return {name: size} of the dimensions of the mesh whose links are measured: inner (neighbouring ranks) and outer."""
    if devices == 1:
        return {}
    return {"outer": 2, "inner": devices // 2} if devices > 2 and devices % 2 == 0 else {"inner": devices}


def links(folder: Path, *, ranks: int, accelerator: str, mb: int) -> dict[str, float]:
    """Return {"DIMENSION/all_reduce": GB/s that a device sends in an all-reduce of `mb` MB along this mesh dimension}."""
    dist.init_process_group("nccl" if accelerator == "cuda" else "gloo")
    sizes = dimensions(ranks)
    mesh = init_device_mesh(accelerator, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {
        f"{name}/all_reduce": _gbps(mesh.get_group(name), n, int(mb * 1e6 / 4), mesh.device_type) for name, n in sizes.items()
    }


def _gbps(group: dist.ProcessGroup, n: int, length: int, device: str) -> float:
    tensor, taken = torch.ones(length, device=device), []
    for _ in range(TIMES + 1):
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    sent = 2 * (n - 1) / n * length * 4
    return sent / statistics.median(taken[1:]) / 1e9


def disk(folder: Path, *, ranks: int, accelerator: str, place: str, mb: int) -> dict[str, float]:
    """Return GB/s of "write" (checkpoint with hashes and fsync), "fsync" (plain file with fsync) and "read" (the checkpoint).

    Args:
        place: the folder whose disk is measured. All files are removed at the end.
        mb: megabytes of the checkpoint.
    """
    path, size = Path(place) / f".certify-{os.getpid()}", mb * 10**6
    content = {"state_dict": {"weight": torch.rand(size // 4)}, "global_step": 1}

    def fsync() -> None:
        with open(path, "wb") as file:
            file.write(bytes(size))
            os.fsync(file.fileno())

    ways = (("fsync", fsync), ("write", partial(disk_format.write, content, path)), ("read", partial(disk_format.read, path)))
    speeds = {}
    try:
        for name, work in ways:
            begin = time.perf_counter()
            work()
            speeds[name] = size / (time.perf_counter() - begin) / 1e9
    finally:
        disk_format.remove(path)
    return speeds

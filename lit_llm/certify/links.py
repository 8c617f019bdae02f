"""Speeds of links between devices, of the disk, and of the loader."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lit_llm.certify.training import SIZES, text_data
from lit_llm.checkpoint import format
from lit_llm.models.gpt import GPTConfig

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
TIMES = 5


def dimensions(devices: int) -> dict[str, int]:
    """Of the mesh whose links are measured: name → size. Neighbours are `inner`, as ranks of tensor parallelism."""
    if devices == 1:
        return {}
    return {"outer": 2, "inner": devices // 2} if devices > 2 and devices % 2 == 0 else {"inner": devices}


def links(folder: Path, *, ranks: int, accelerator: str, megabytes: float) -> dict[str, float]:
    """GB/s that a device sends in each kind of collective along each dimension of a mesh; median of five."""
    dist.init_process_group("nccl" if accelerator == "cuda" else "gloo")
    sizes = dimensions(ranks)
    mesh = init_device_mesh(accelerator, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {
        f"{name}/{kind}": _gbps(kind, mesh.get_group(name), n, int(megabytes * 1e6 / 4) // n * n, mesh.device_type)
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


def disk(folder: Path, *, ranks: int, place: str, megabytes: float) -> dict[str, float]:
    """GB/s of writing a checkpoint (hashed, checked and on the disk), of a plain write with fsync, and of reading it.

    Args:
        place: the folder whose disk is meant. Nothing stays there.
    """
    path = Path(place) / f".certify-{os.getpid()}.ckpt"
    content = {"state_dict": {"weight": torch.rand(int(megabytes * 1e6 / 4))}, "global_step": 1}
    size, found = content["state_dict"]["weight"].numel() * 4, {}  # type: ignore[index]

    def fsync() -> None:
        with open(path, "wb") as file:
            file.write(bytes(size))
            os.fsync(file.fileno())

    ways: dict[str, Callable[[], Any]] = {
        "fsync": fsync,
        "write": lambda: format.write(content, path),
        "read": lambda: format.read(path),
    }
    try:
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            found[name] = size / (time.perf_counter() - begin) / 1e9
            if name == "fsync":
                path.unlink()
    finally:
        format.remove(path)
    return found


def loader(folder: Path, *, ranks: int, size: str, micro_batch: int) -> dict[str, float]:
    """Seconds in which the loader gives a micro-batch."""
    data = text_data(folder, GPTConfig(**SIZES[size]), micro_batch)
    data.prepare_data()
    data.setup("fit")
    batches = iter(data.train_dataloader())
    next(batches)
    begin = time.perf_counter()
    for _ in range(20):
        next(batches)
    return {"seconds": (time.perf_counter() - begin) / 20}

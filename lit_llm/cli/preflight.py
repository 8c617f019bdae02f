"""What can be known before a run folder is written: which classes a group can name, and what callbacks would refuse."""

from __future__ import annotations

from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.optim import Optimizer

from lit_llm import callbacks
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.float8 import float8_problem
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.tensor_parallel import tensor_parallel_problems
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig


def layout(
    strategy: Strategy, world_size: int, model: GPTConfig | None, architecture: Architecture | None = None
) -> tuple[int | None, list[str]]:
    """Data-parallel ranks of the run (None if that cannot be said), and why the model cannot be laid out over its processes."""
    if not isinstance(strategy, MeshStrategy):
        found = []
        # Others would train replicas that drift apart (ModelParallelStrategy shards nothing by itself), or were never tried.
        if world_size > 1 and not isinstance(strategy, DDPStrategy):
            found.append(
                f"{type(strategy).__name__} is not known to train one model on {world_size} processes: use ddp or "
                "lit_llm.distributed.mesh_strategy.MeshStrategy (--config recipes/strategy/ddp.yaml or fsdp2.yaml)"
            )
        return world_size, found
    try:
        replicate, shard, tensor_parallel = strategy.sizes(world_size)
    except ValueError as error:
        return None, [str(error)]
    found = []
    if architecture is not None and tensor_parallel > 1:
        found.append(
            f"tensor_parallel={tensor_parallel} splits the matrices of lit_llm's own model, and {architecture.class_path} is "
            "another: shard it (--trainer.strategy.tensor_parallel 1, --config recipes/strategy/fsdp2.yaml)"
        )
    elif model is not None and not model.problems() and tensor_parallel > 1:
        found += tensor_parallel_problems(model, tensor_parallel)
    return replicate * shard, found


def optimizer_problems(strategy: Strategy, class_path: str) -> list[str]:
    """Optimizers that do not work on distributed parameters, told by name."""
    if isinstance(strategy, MeshStrategy) and class_path.rpartition(".")[2] == "Adafactor":
        return [
            "Adafactor's row and column sums do not work on distributed parameters: AdamW, Adam, SGD, Lion and MuonAdamW do "
            "(--optimizer, or --trainer.strategy ddp)"
        ]
    return []


def device_problems(trainer: Trainer, compute: ComputeConfig | None) -> list[str]:
    """What the recipe asks for and the devices cannot do, one sentence each."""
    device = trainer.strategy.root_device
    found = []
    if compute is not None and compute.float8 and (problem := float8_problem(device)):
        found.append(problem)
    wants_bf16 = str(trainer.precision).startswith("bf16") and device.type == "cuda"
    if wants_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        found.append(f"{name} has no bf16: the nearest that works is --trainer.precision 16-mixed")
    return found


def devices_problem(devices: Any) -> str | None:
    """Why `trainer.devices` (auto, a number, or a list of devices, also as text) names no devices on any machine, or None."""
    if devices in ("auto", None):
        return None
    rule = "the number of devices, at least 1, or auto, or -1 for all GPUs, or a list such as [0,1]"
    entries = devices if isinstance(devices, list) else str(devices).split(",")
    try:
        numbers = [int(entry) for entry in entries if str(entry).strip()]
    except ValueError:
        return f"trainer.devices is {devices!r}, it must be {rule} (--trainer.devices auto)"
    listed = isinstance(devices, list) or "," in str(devices)
    if not numbers or (min(numbers) < 0 if listed else numbers[0] == 0 or numbers[0] < -1):
        return f"trainer.devices is {devices}, it must be {rule} (--trainer.devices 1)"
    if listed and len(set(numbers)) < len(numbers):
        unique = ",".join(str(number) for number in dict.fromkeys(numbers))
        return f"trainer.devices is {devices}, which names a device twice (--trainer.devices [{unique}])"
    return None


def trainer_problem(said: str, trainer: Namespace) -> str:
    """What Lightning says of a Trainer that cannot be built, as one sentence that names what would work here."""
    there = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    devices = f"{there} GPU{'' if there == 1 else 's'}"
    if "No supported gpu backend" in said or "CUDAAccelerator can not run" in said:
        return (
            f"trainer.accelerator is {trainer.accelerator}, and torch finds {devices} on this machine "
            "(--trainer.accelerator cpu, or auto)"
        )
    if "your machine only has" in said:
        return f"trainer.devices is {trainer.devices}, this machine has {devices} (--trainer.devices {there})"
    if "CPUAccelerator" in said:
        return (
            f"trainer.devices is {trainer.devices}, and on a CPU it is the number of processes, at least 1 "
            "(--trainer.devices 1)"
        )
    return f"trainer: {' '.join(said.split())}"


def callback_problems(trainer: Trainer) -> list[str]:
    """What the callbacks would refuse once training starts, when a run folder has been written: one sentence each."""
    found = []
    if trainer.log_every_n_steps < 1:  # type: ignore[attr-defined]
        found.append("trainer.log_every_n_steps must be at least 1 (--trainer.log_every_n_steps)")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.Schedule) and trainer.max_steps != -1:  # else the data say how many steps there are
            try:
                callback.resolve(trainer)
            except ValueError as error:
                found.append(str(error))
        if isinstance(callback, callbacks.BatchRamp | callbacks.Profile):
            found += callback.trainer_problems(trainer)
    if trainer.max_steps == -1 and trainer.max_epochs in (None, -1):
        found.append("the run has no end: give --trainer.max_steps or --trainer.max_epochs")
    return found


def concrete_subclasses(base: type) -> list[type]:
    """Classes that a group can name: the base and everything below it that is public and not abstract."""
    found, queue = [], [base]
    while queue:
        cls = queue.pop()
        queue += cls.__subclasses__()
        abstract = bool(getattr(cls, "__abstractmethods__", None))
        if not abstract and not cls.__name__.startswith("_") and cls not in (LightningDataModule, Optimizer):
            found.append(cls)
    return list(dict.fromkeys(found))

"""Checks of a recipe before its run folder is written: layout, devices, accelerator, logger, callbacks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lit_llm import callbacks
from lit_llm.cli.constructor_errors import is_mistake
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.float8 import float8_problem
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.tensor_parallel import tensor_parallel_problems
from lit_llm.errors import UserError
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig


def launcher_problem(strategy: object) -> str | None:
    """Why a strategy's name is refused: spawned and forked processes would need every callback to be pickled."""
    if isinstance(strategy, str) and strategy.startswith(("ddp_spawn", "ddp_fork", "ddp_notebook")):
        return f"trainer.strategy is {strategy}, but its way to start processes is not supported (--trainer.strategy ddp)"
    return None


def layout(
    strategy: Strategy, world_size: int, model: GPTConfig | None, architecture: Architecture | None = None
) -> tuple[int | None, list[str]]:
    """The number of data-parallel ranks (None if the layout is impossible), and why the model cannot be laid out so."""
    if not isinstance(strategy, MeshStrategy):
        found = []
        # ModelParallelStrategy, for example, shards nothing by itself: it would train replicas that drift apart.
        if world_size > 1 and not isinstance(strategy, DDPStrategy):
            found.append(
                f"{type(strategy).__name__} is not known to train one model on {world_size} processes; use ddp or "
                "lit_llm.distributed.mesh_strategy.MeshStrategy (--config recipes/strategy/ddp.yaml or fsdp2.yaml)"
            )
        return world_size, found
    try:
        replicate, shard, tensor_parallel = strategy.sizes(world_size)
    except UserError as error:
        return None, [str(error)]
    found = []
    if architecture is not None and tensor_parallel > 1:
        found.append(
            f"tensor_parallel={tensor_parallel} works with lit_llm's GPT only, not with {architecture.class_path}; use shards "
            "instead (--trainer.strategy.tensor_parallel 1, --config recipes/strategy/fsdp2.yaml)"
        )
    elif model is not None and not model.problems() and tensor_parallel > 1:
        found += tensor_parallel_problems(model, tensor_parallel)
    return replicate * shard, found


def device_problems(trainer: Trainer, compute: ComputeConfig | None) -> list[str]:
    """Features of the recipe that the device does not have, one sentence each."""
    device = trainer.strategy.root_device
    found = []
    if compute is not None and compute.float8 and (problem := float8_problem(device)):
        found.append(problem)
    wants_bf16 = str(trainer.precision).startswith("bf16") and device.type == "cuda"
    if wants_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        found.append(f"{name} does not support bf16; use fp16 (--trainer.precision 16-mixed)")
    return found


def optimizer_device_problem(trainer: Trainer, optimizer: Namespace) -> str | None:
    """Why the optimizer's options do not work on the device; torch would say so in the first step."""
    device = trainer.strategy.root_device.type
    if (optimizer.get("init_args") or {}).get("capturable") is True and device == "cpu":
        return f"optimizer.capturable is true, but works on GPUs only, not on {device} (--optimizer.capturable false)"
    return None


def devices_problem(devices: Any) -> str | None:
    """Why `trainer.devices` (auto, a number, or a list of devices, also as text) is wrong on any machine; None if it is not."""
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


def accelerator_problem(trainer: Namespace) -> str | None:
    """Why this machine does not have the accelerator or the devices that a recipe asks for; None if it does."""
    name, devices = trainer.accelerator, trainer.devices
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = 0 if accelerator is None else torch.accelerator.device_count()
    here = f"{count} GPU{'' if count == 1 else 's'}"
    if name in ("gpu", "cuda", "mps") and (accelerator is None or name not in ("gpu", accelerator.type)):
        return (
            f"trainer.accelerator is {name}, and torch finds {here if name == 'gpu' else f'no {name} device'} on this machine "
            "(--trainer.accelerator cpu, or auto)"
        )
    if devices in ("auto", None):
        return None
    if name == "cpu" or (name == "auto" and accelerator is None):
        if str(devices).isdecimal():
            return None
        return f"trainer.devices is {devices}, and on a CPU it is the number of processes, at least 1 (--trainer.devices 1)"
    one_per_process = torch.distributed.is_torchelastic_launched() and count == 1
    if name not in ("auto", "gpu", "cuda", "mps") or one_per_process:
        return None
    entries = devices if isinstance(devices, list) else str(devices).split(",")
    numbers = [int(entry) for entry in entries if str(entry).strip()]
    listed = isinstance(devices, list) or "," in str(devices)
    if max(numbers) >= count if listed else numbers[0] > count:
        return f"trainer.devices is {devices}, this machine has {here} (--trainer.devices {count})"
    return None


_LOGGER_PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "CometLogger": "comet_ml", "NeptuneLogger": "neptune"}


def logger_problems(loggers: Any) -> list[str]:
    """Loggers whose package is not installed, one sentence each."""
    found = []
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        name = str(logger.class_path).rpartition(".")[2] if isinstance(logger, Namespace) else None
        package = _LOGGER_PACKAGES.get(name or "")
        if package is not None and find_spec(package) is None:
            found.append(f"{name} needs a package that is not installed: pip install {package} (--trainer.logger)")
    return found


def callback_problems(trainer: Trainer) -> list[str]:
    """What the callbacks would refuse when training starts, one sentence each. By then a run folder would exist."""
    found = []
    if trainer.log_every_n_steps < 1:  # type: ignore[attr-defined]
        found.append("trainer.log_every_n_steps must be at least 1 (--trainer.log_every_n_steps)")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.Schedule) and trainer.max_steps != -1:  # else the data decide
            try:
                callback.resolve(trainer)
            except ValueError as error:
                if not is_mistake(error):
                    raise
                found.append(str(error))
        if isinstance(callback, callbacks.BatchRamp | callbacks.Profile):
            found += callback.trainer_problems(trainer)
    if trainer.max_steps == -1 and trainer.max_epochs in (None, -1):
        found.append("the run has no end: choose a recipe (--config NAME), or set --trainer.max_steps or --trainer.max_epochs")
    return found

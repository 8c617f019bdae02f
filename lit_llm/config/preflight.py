"""Checks of a recipe before its run folder is written: layout, devices, accelerator, logger, callbacks."""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lit_llm import callbacks
from lit_llm.config.devices import device_numbers
from lit_llm.config.parse_errors import is_mistake
from lit_llm.data import TokenDataModule
from lit_llm.distributed.block_kernels import float8_problem
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.layout_problems import clip_problem
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.attention_kernel_choice import attention_problem
from lit_llm.models.gpt import GPTConfig


def launcher_problem(strategy: object) -> str | None:
    """Return why a strategy is refused (it spawns or forks processes, so every callback would have to be pickled), or None."""
    if isinstance(strategy, str) and strategy.startswith(("ddp_spawn", "ddp_fork", "ddp_notebook")):
        return f"trainer.strategy is {strategy}, but its way to start processes is not supported (--trainer.strategy ddp)"
    return None


def device_problems(trainer: Trainer, compute: ComputeConfig | None, model: GPTConfig | None) -> list[str]:
    """Return a sentence for each feature of the recipe (float8, attention kernel, bf16) that the device does not support."""
    device = trainer.strategy.root_device
    problems: list[str] = []
    if compute is not None and compute.float8:
        problems += filter(None, [float8_problem(device)])
    if compute is not None and model is not None and not model.problems():
        problems += filter(None, [attention_problem(model, compute.attention, device)])
    wants_bf16 = str(trainer.precision).startswith("bf16") and device.type == "cuda"
    if wants_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        problems.append(f"{name} does not support bf16; use fp16 (--trainer.precision 16-mixed)")
    return problems


def optimizer_device_problem(trainer: Trainer, optimizer: Namespace) -> str | None:
    """Return why an option of the optimizer does not work on the Trainer's device, or None.

    torch itself refuses `capturable` on a CPU only in the first step, and never refuses `foreach`.
    """
    device, options = trainer.strategy.root_device.type, optimizer.get("init_args") or {}
    if options.get("capturable") is True and device == "cpu":
        return f"optimizer.capturable is true, but works on GPUs only, not on {device} (--optimizer.capturable false)"
    if options.get("foreach") is True and device == "cpu" and trainer.precision in ("bf16-true", "16-true"):
        return (
            f"optimizer.foreach is true, but on a CPU torch then rounds betas and decay as {trainer.precision} rounds weights: "
            "0.999 is 1 in bf16 (--optimizer.foreach false)"
        )
    return None


def name_problems(trainer: Namespace) -> list[str]:
    """Return a sentence for each Trainer setting whose value is an unknown name, with the most similar known name."""
    known = {
        "strategy": ["auto", *StrategyRegistry.available_strategies()],
        "accelerator": ["auto", "gpu", *AcceleratorRegistry.available_accelerators()],
        "profiler": ["simple", "advanced", "pytorch", "xla"],
        "gradient_clip_algorithm": ["norm", "value"],
    }
    return [*filter(None, (_name_problem(key, trainer.get(key), names) for key, names in known.items()))]


def _name_problem(key: str, value: Any, names: list[str]) -> str | None:
    if not isinstance(value, str) or value in names:
        return None
    near = difflib.get_close_matches(value.lower(), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known names: {', '.join(name for name in names if '_' not in name)}"
    return f"trainer.{key} is {value[:60]!r}, which is not known{hint} (--trainer.{key})"


def accelerator_problem(trainer: Namespace) -> str | None:
    """Return why this machine lacks the accelerator or the devices of the Trainer settings `trainer`; None if it has both."""
    name, devices = trainer.accelerator, trainer.devices
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = 0 if accelerator is None else torch.accelerator.device_count()
    here = f"{count} GPU{'' if count == 1 else 's'}"
    if name == "mps" or (accelerator is not None and accelerator.type == "mps" and name != "cpu"):
        return f"trainer.accelerator is {name}, which is not supported on macOS (--trainer.accelerator cpu)"
    if name in ("gpu", "cuda") and (accelerator is None or name not in ("gpu", accelerator.type)):
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
    if name not in ("auto", "gpu", "cuda") or one_per_process:
        return None
    numbers, listed = device_numbers(devices)
    if max(numbers) >= count if listed else numbers[0] > count:
        return f"trainer.devices is {devices}, this machine has {here} (--trainer.devices {count})"
    return None


_LOGGER_PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "CometLogger": "comet_ml", "NeptuneLogger": "neptune"}


def logger_problems(loggers: Any) -> list[str]:
    """Return a sentence for each logger in the setting trainer.logger whose package is not installed."""
    problems: list[str] = []
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        name = str(logger.class_path).rpartition(".")[2] if isinstance(logger, Namespace) else None
        package = _LOGGER_PACKAGES.get(name or "")
        if package is not None and find_spec(package) is None:
            problems.append(f"{name} needs a package that is not installed: pip install {package} (--trainer.logger)")
    return problems


_INSTEAD: dict[type[Callback], str] = {
    lightnings.StochasticWeightAveraging: "--ema EMA averages the weights",
    lightnings.WeightAveraging: "--ema EMA averages the weights",
    lightnings.LearningRateFinder: "python -m lit_llm find-lr finds a rate",
    lightnings.BatchSizeFinder: "python -m lit_llm find-batch finds a batch size",
    lightnings.BackboneFinetuning: "--lora.rank N trains a small part of the weights",
    lightnings.ModelPruning: "nothing here prunes weights",
}
"""{Lightning's callback that fails with a LanguageModel: text that says what to use instead}."""


def callback_problems(trainer: Trainer, data: object = None) -> list[str]:
    """Return a sentence for each reason why callbacks would refuse the run at its start, when its folder already exists."""
    problems: list[str] = []
    if isinstance(trainer.strategy, MeshStrategy):
        problems += filter(None, [clip_problem(trainer.strategy.pipeline, trainer.gradient_clip_val)])
    if trainer.log_every_n_steps < 1:  # type: ignore[attr-defined]
        problems.append("trainer.log_every_n_steps must be at least 1 (--trainer.log_every_n_steps)")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        instead = next((what for kind, what in _INSTEAD.items() if isinstance(callback, kind)), None)
        if isinstance(callback, lightnings.GradientAccumulationScheduler):
            if isinstance(data, TokenDataModule):
                instead = "data.global_batch_size and --batch_ramp BatchRamp set the batch"
            elif trainer.accumulate_grad_batches != 1:
                instead = f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, it needs 1"
        if instead is not None:
            problems.append(f"{type(callback).__name__} does not work here: {instead}; remove it from trainer.callbacks")
        if isinstance(callback, callbacks.Schedule) and trainer.max_steps != -1:  # with -1, steps are unknown before the data
            try:
                callback.resolve(trainer)
            except ValueError as error:
                if not is_mistake(error):
                    raise
                problems.append(str(error))
        if isinstance(callback, callbacks.BatchRamp | callbacks.Profile):
            problems += callback.trainer_problems(trainer)
    return problems

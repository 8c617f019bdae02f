"""Checks of a recipe before its run folder is written: layout, devices, accelerator, logger, callbacks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lit_llm import callbacks
from lit_llm.config.constructor_errors import is_mistake
from lit_llm.core.batch_sizes import micro_batch
from lit_llm.core.errors import UserError
from lit_llm.data import TokenDataModule
from lit_llm.distributed.attention_kernel import attention_problem
from lit_llm.distributed.block_kernels import float8_problem
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.context_parallel import context_problems
from lit_llm.distributed.layout_problems import clip_problem, pipeline_problems
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.tensor_parallel import tensor_parallel_problem
from lit_llm.models.custom import Architecture, layout_problems
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig


def launcher_problem(strategy: object) -> str | None:
    """Why a strategy's name is refused: spawned and forked processes would need every callback to be pickled."""
    if isinstance(strategy, str) and strategy.startswith(("ddp_spawn", "ddp_fork", "ddp_notebook")):
        return f"trainer.strategy is {strategy}, but its way to start processes is not supported (--trainer.strategy ddp)"
    return None


def layout(
    strategy: Strategy,
    world_size: int,
    model: GPTConfig | None,
    architecture: Architecture | None = None,
    compute: ComputeConfig | None = None,
    precision: str = "32-true",
    loss: LossConfig | None = None,
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
        sizes = strategy.sizes(world_size)
    except UserError as error:
        return None, [str(error)]
    found, tensor_parallel = _unused_settings(strategy), sizes.tensor_parallel
    if architecture is not None:
        found += layout_problems(architecture.class_path, tensor_parallel, sizes.context)
    elif model is not None and not model.problems() and tensor_parallel > 1:
        problem = tensor_parallel_problem(model, tensor_parallel)
        found += [problem] if problem else []
    found += pipeline_problems(
        strategy.pipeline_layout,
        sizes,
        model,
        architecture,
        compute,
        precision,
        loss.chunk_size if loss else None,
        reshards=strategy.reshard_after_forward is True,
    )
    if architecture is None and model is not None and not model.problems() and sizes.context > 1:
        found += context_problems(model, sizes, strategy.context_attention)
    return sizes.data_parallel, found


def _unused_settings(strategy: MeshStrategy) -> list[str]:
    """Settings of a pipeline or of context parallelism in a layout without it, one sentence each."""
    settings: list[tuple[str, object, object, str]] = []
    if strategy.context == 1:
        settings.append(("context_attention", strategy.context_attention, "gather", "context"))
    if strategy.pipeline == 1:
        values = strategy.pipeline_layout._asdict()
        defaults = PipelineLayout(strategy.pipeline)._asdict()
        settings += [(name, values[name], default, "pipeline") for name, default in defaults.items()]
    return [
        f"{name} is {value}, but --trainer.strategy.{size} is 1, so it changes nothing: use at least 2, or remove it "
        f"(--trainer.strategy.{name} {'null' if default is None else default})"
        for name, value, default, size in settings
        if value != default
    ]


def epoch_problem(trainer: Trainer, data: TokenDataModule, ranks: int) -> str | None:
    """Why a pipeline cannot run the last step of an epoch that `limit_train_batches` ends within a step; None if it can."""
    strategy, limit = trainer.strategy, trainer.limit_train_batches
    if not isinstance(strategy, MeshStrategy) or strategy.pipeline == 1 or not isinstance(limit, int):
        return None
    layout, batch = strategy.pipeline_layout, data.global_batch_size
    rest = limit % (batch // (micro_batch(batch, data.micro_batch_size, ranks, layout) * ranks))
    if not rest or layout.runs(rest):
        return None
    fits = f"--trainer.limit_train_batches {limit - rest}" if limit > rest else "--trainer.limit_train_batches null"
    return (
        f"trainer.limit_train_batches is {limit}, so the last step of an epoch has {rest} micro-batches, too few for schedule "
        f"{layout.schedule} of pipeline={strategy.pipeline} ({fits})"
    )


def device_problems(trainer: Trainer, compute: ComputeConfig | None, model: GPTConfig | None) -> list[str]:
    """Features of the recipe that the device does not have, one sentence each."""
    device = trainer.strategy.root_device
    found = []
    if compute is not None and compute.float8 and (problem := float8_problem(device)):
        found.append(problem)
    if compute is not None and model is not None and not model.problems():
        problem = attention_problem(model, compute.attention, device)
        found += [problem] if problem else []
    wants_bf16 = str(trainer.precision).startswith("bf16") and device.type == "cuda"
    if wants_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        found.append(f"{name} does not support bf16; use fp16 (--trainer.precision 16-mixed)")
    return found


def optimizer_device_problem(trainer: Trainer, optimizer: Namespace) -> str | None:
    """Why the optimizer's options do not work on the device. Torch would refuse capturable in the first step, foreach never."""
    device, options = trainer.strategy.root_device.type, optimizer.get("init_args") or {}
    if options.get("capturable") is True and device == "cpu":
        return f"optimizer.capturable is true, but works on GPUs only, not on {device} (--optimizer.capturable false)"
    if options.get("foreach") is True and device == "cpu" and trainer.precision in ("bf16-true", "16-true"):
        return (
            f"optimizer.foreach is true, but on a CPU torch then rounds betas and decay as {trainer.precision} rounds weights: "
            "0.999 is 1 in bf16 (--optimizer.foreach false)"
        )
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


_INSTEAD: dict[type[Callback], str] = {
    lightnings.StochasticWeightAveraging: "--ema EMA averages the weights",
    lightnings.WeightAveraging: "--ema EMA averages the weights",
    lightnings.LearningRateFinder: "python -m lit_llm find-lr finds a rate",
    lightnings.BatchSizeFinder: "python -m lit_llm find-batch finds a batch size",
    lightnings.BackboneFinetuning: "--lora.rank N trains a small part of the weights",
    lightnings.ModelPruning: "nothing here prunes weights",
}
"""Lightning's callbacks that fail with a LanguageModel, and what there is instead."""


def callback_problems(trainer: Trainer, data: object = None) -> list[str]:
    """What the callbacks would refuse when training starts, one sentence each. By then a run folder would exist."""
    found = []
    if isinstance(trainer.strategy, MeshStrategy):
        problem = clip_problem(trainer.strategy.pipeline, trainer.gradient_clip_val)
        found += [problem] if problem else []
    if trainer.log_every_n_steps < 1:  # type: ignore[attr-defined]
        found.append("trainer.log_every_n_steps must be at least 1 (--trainer.log_every_n_steps)")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        instead = next((what for kind, what in _INSTEAD.items() if isinstance(callback, kind)), None)
        if isinstance(callback, lightnings.GradientAccumulationScheduler):
            if isinstance(data, TokenDataModule):
                instead = "data.global_batch_size and --batch_ramp BatchRamp set the batch"
            elif trainer.accumulate_grad_batches != 1:
                instead = f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, it needs 1"
        if instead is not None:
            found.append(f"{type(callback).__name__} does not work here: {instead}; remove it from trainer.callbacks")
        if isinstance(callback, callbacks.Schedule) and trainer.max_steps != -1:  # else the data decide
            try:
                callback.resolve(trainer)
            except ValueError as error:
                if not is_mistake(error):
                    raise
                found.append(str(error))
        if isinstance(callback, callbacks.BatchRamp | callbacks.Profile):
            found += callback.trainer_problems(trainer)
    return found


def end_problems(trainer: Trainer) -> list[str]:
    """A sentence if the run has no end."""
    if trainer.max_steps == -1 and trainer.max_epochs in (None, -1):
        return ["the run has no end: choose a recipe (--config NAME), or set --trainer.max_steps or --trainer.max_epochs"]
    return []

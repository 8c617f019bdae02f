"""Build the Trainer of a recipe, with callbacks, loggers, plugins and checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm import callbacks
from lit_llm.callbacks.tensorboard_setup import tensorboard_logger
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO, FolderCheckpointIO
from lit_llm.config.run_callbacks import run_callbacks
from lit_llm.config.run_spec import RunSpec
from lit_llm.core._lightning import before_connecting, keep_order_of_loaders, log_at_optimizer_steps, watch_launched
from lit_llm.core.disk import read_json
from lit_llm.core.errors import UserError
from lit_llm.core.ranks import is_slurm, launched_ranks
from lit_llm.distributed.mesh_strategy import MeshStrategy, loss_scaling
from lit_llm.runs.resume import RunStart
from lit_llm.runs.run_folder import LOGGER_RUN_ARGUMENTS, LOGGER_RUNS, METRICS
from lit_llm.runs.setting_changes import same_on_all_ranks
from lit_llm.training.bounded_exit import end_with_launcher, launches_ranks
from lit_llm.training.lost_peer import launched_rank_ended
from lit_llm.training.meeting import meet


def make_trainer(spec: RunSpec, groups: list[Callback], *, extra_logger: Logger | None, replaced: Mapping[str, Any]) -> Trainer:
    """Build and return the Trainer of a run.

    Args:
        groups: callbacks that the recipe's groups, such as checkpoint and schedule, define.
        extra_logger: a logger in addition to the recipe's loggers, or None.
        replaced: {argument of Trainer: value used instead of the recipe's}.
    """
    if spec.start.step is not None:
        _continue_logged_runs(spec.config.trainer.get("logger"), spec.run_dir)
    settings = {**spec.build("trainer", without=replaced).as_dict(), **replaced, "default_root_dir": str(spec.run_dir)}
    settings["logger"] = _loggers(settings["logger"], spec.run_dir, spec.start) if spec.fits else False  # not of evaluations
    own, progress_bar = _as_list(settings["callbacks"]), settings["enable_progress_bar"] is not False
    settings["callbacks"] = run_callbacks(spec, own, groups, saves=not settings["fast_dev_run"], progress_bar=progress_bar)
    if not any(isinstance(callback, Checkpoint) for callback in settings["callbacks"]):
        settings["enable_checkpointing"] = False  # otherwise Lightning adds a checkpoint callback
    if isinstance(settings["strategy"], FSDPStrategy) or settings["strategy"] in ("fsdp", "fsdp_cpu_offload"):
        settings["strategy"] = MeshStrategy.from_fsdp1(settings["strategy"], int(settings["num_nodes"]))
    if "plugins" not in replaced:
        settings["plugins"] = _plugins(settings)
        if settings["precision"] == "16-mixed" and (device := _scaled_device(settings)):
            settings["plugins"] = [*(settings["plugins"] or []), loss_scaling(device)]
            settings["precision"] = None  # Lightning accepts a precision or a precision plugin, not both
    trainer = Trainer(**settings)
    asked = trainer.num_devices * trainer.num_nodes  # not `world_size`: a strategy may take it from the launcher
    if "devices" not in replaced and (launched := launched_ranks()) not in (None, asked):
        raise UserError(
            f"{launched} processes are launched, but trainer.devices and trainer.num_nodes make {asked} "
            "(--trainer.devices, --trainer.num_nodes)"
        )
    keep_order_of_loaders(trainer)
    log_at_optimizer_steps(trainer)
    if trainer.world_size > 1:
        settings = same_on_all_ranks(spec.settings())
        before_connecting(trainer.strategy, partial(meet, trainer, settings))
        if trainer.local_rank == 0:
            launches_ranks()
            watch_launched(lambda rank, code: launched_rank_ended(trainer.global_rank + rank, code))
        else:
            end_with_launcher()
    if extra_logger is not None:
        trainer.loggers = [*trainer.loggers, extra_logger]
    _set_checkpoint_format(trainer, spec)
    return trainer


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _continue_logged_runs(loggers: Any, run_dir: Path) -> None:
    """Set the run id of loggers of W&B and MLflow to the id that the run folder has recorded, unless the recipe has an id."""
    recorded = read_json(run_dir / LOGGER_RUNS) if (run_dir / LOGGER_RUNS).exists() else {}
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        name = str(logger.class_path).rpartition(".")[2] if isinstance(logger, Namespace) else ""
        argument = LOGGER_RUN_ARGUMENTS.get(name)
        if argument and isinstance(recorded.get(name), str) and not logger.init_args.get(argument):
            logger.init_args[argument] = recorded[name]


def _loggers(logger: Any, run_dir: Path, start: RunStart) -> Any:
    """Return the recipe's loggers (default: TensorBoardLogger) and the logger of metrics.jsonl; False with `logger: false`."""
    if logger is False or logger == []:
        return False
    if logger in (None, True):
        logger = tensorboard_logger(run_dir, start.step)
    return [*_as_list(logger), callbacks.MetricsFile(run_dir / METRICS, -1 if start.step is None else start.step)]


def _plugins(settings: Mapping[str, Any]) -> Any:
    if is_slurm():  # Lightning's requeue saves between two micro-batches; StopOnSignal saves after a step
        return [*_as_list(settings["plugins"]), SLURMEnvironment(auto_requeue=False)]
    return settings["plugins"]


def _scaled_device(settings: Mapping[str, Any]) -> str | None:
    """Return the device type for which fp16 needs lit_llm's loss scaling plugin; None if Lightning's loss scaling works."""
    if settings["accelerator"] == "cpu" or (settings["accelerator"] == "auto" and not torch.accelerator.is_available()):
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator and isinstance(settings["strategy"], MeshStrategy) else None


def _set_checkpoint_format(trainer: Trainer, spec: RunSpec) -> None:
    """Let the Trainer write checkpoints in lit_llm's format, unless the recipe has a checkpoint plugin."""
    config, strategy, fits = spec.config, trainer.strategy, spec.fits
    sharded, background = (False, False) if spec.scratch else (config.sharded_checkpoints, config.async_checkpoints)
    splits = False
    if isinstance(strategy, MeshStrategy):
        splits = strategy.splits_model(trainer.world_size)
        strategy.sharded_checkpoints |= splits if sharded == "auto" else sharded
    elif sharded is True and fits:
        rank_zero_warn("sharded_checkpoints changes nothing here: only MeshStrategy can write shards (strategy/fsdp2).")
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        verified = spec.start.checkpoint
        if fits and background is True:
            strategy.checkpoint_io = AsyncFolderCheckpointIO(verified)
        elif fits and background == "auto" and splits:
            strategy.checkpoint_io = AsyncFolderCheckpointIO(verified, processes_to_fit=trainer.num_devices)
        else:
            strategy.checkpoint_io = FolderCheckpointIO(verified)

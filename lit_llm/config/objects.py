"""Build the objects that a recipe names. If a constructor refuses its arguments, the object is left out. No data are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lit_llm.config.devices import devices_problem
from lit_llm.config.groups import ARCHITECTURE, CALLBACKS
from lit_llm.config.parse_errors import is_mistake
from lit_llm.config.preflight import accelerator_problem, launcher_problem, logger_problems, name_problems
from lit_llm.config.recipe_files import reference_curve
from lit_llm.config.run_spec import RunSpec
from lit_llm.config.trainer import make_trainer
from lit_llm.core.errors import UserError, noting, refuse
from lit_llm.data import TokenDataModule
from lit_llm.distributed.layout import layout_of
from lit_llm.distributed.parallel_layout import Layout
from lit_llm.models.config import MODEL_DOMAINS
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.optim import scale_rates
from lit_llm.optim.torch_muon import REPLACED
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.training.language_model import LanguageModel


@dataclass(frozen=True)
class RunObjects:
    """Record of the objects of a run, which `make_objects` builds from the recipe.

    Attributes:
        parts: {group of the recipe: object}; groups that are off, or whose object could not be built, are missing.
        architecture: the custom model that the recipe names; None: a GPT.
        follower: logger that compares the losses with a recorded curve; None without the setting `check_against`.
        optimizer: the recipe's optimizer, built for two small parameters to check its arguments. None: it could not be built.
        trainer: the Trainer. None: the command is `prepare`, or the Trainer could not be built.
        strategy: the Trainer's strategy, or, for a run planned for another machine, the strategy that the recipe names.
        layout: the parallel layout of the strategy; one device without a Trainer. None: the devices do not fit the strategy.
        problems: a sentence for each object that could not be built.
        missing_data: sentences about data files that are not on this machine. Only with `spec.machine`.
        model: the model, built after all checks. None: the command is `prepare`.
    """

    spec: RunSpec
    parts: dict[str, Any]
    architecture: Architecture | None
    follower: CurveFollower | None
    optimizer: Optimizer | None
    trainer: Trainer
    strategy: Any
    layout: Layout | None
    problems: tuple[str, ...]
    missing_data: tuple[str, ...] = ()
    model: LanguageModel = None  # type: ignore[assignment]  # of `prepare`, and until the checks have passed

    @property
    def config(self) -> Namespace:
        """All settings of the run, with final values of the run folder and of settings that depend on the checkpoint."""
        return self.spec.config

    @property
    def datamodule(self) -> Any:
        """The LightningDataModule; None if the DataModule could not be built."""
        return self.parts.get("data")

    @property
    def ranks(self) -> int:
        """Number of processes of the training; 1 without a Trainer."""
        return 1 if self.trainer is None else self.trainer.world_size


def make_objects(spec: RunSpec, replaced: Mapping[str, Any]) -> RunObjects:
    """Return all objects of a run but its model, and set the data's block size, length and pipeline from model and Trainer.

    Args:
        replaced: {argument of Trainer: value used instead of the recipe's}.
    """
    config, problems = spec.config, list[str]()
    parts: dict[str, Any] = {"model": spec.model, "lora": spec.lora, "loss": spec.loss, "compute": spec.compute}
    for group in ("objective", "data", *CALLBACKS):
        if group not in spec.refused:
            with noting(problems):
                parts[group] = spec.build(group)
    parts = {group: built for group, built in parts.items() if built is not None}
    follower, optimizer, trainer, strategy = None, None, None, None
    if spec.fits and config.check_against is not None and "check_tolerance" not in spec.refused:
        with noting(problems):
            path = reference_curve(config.check_against, spec.arguments.config_files)
            follower = CurveFollower.of_file(path, config.check_tolerance)
    if spec.command != "prepare":
        if "optimizer" not in spec.refused:
            with noting(problems):
                optimizer = _small_optimizer(config, spec.model)
        if not {"trainer", "seed_everything"} & spec.refused:
            with noting(problems):
                trainer = _trainer(spec, parts, follower, replaced)
                strategy = trainer.strategy
    if spec.machine is not None and "trainer" not in spec.refused:
        strategy = spec.build("trainer", without=("logger", "callbacks", "profiler", "plugins")).strategy
    layout: Layout | None = Layout()
    if trainer is not None:
        layout, machine = None, spec.machine
        sizes = trainer.world_size, trainer.num_devices
        with noting(problems):
            layout = layout_of(
                strategy or "auto", *(sizes if machine is None else (machine.devices_for(config), machine.per_node))
            )
    architecture = Architecture.of(config.get(ARCHITECTURE))
    objects = RunObjects(spec, parts, architecture, follower, optimizer, trainer, strategy, layout, tuple(problems))  # type: ignore[arg-type]
    _connect(objects)
    return objects


def optimizer_of(config: Namespace, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """Build and return the recipe's optimizer for the parameter groups `groups`."""
    chosen = config.optimizer.as_dict()
    if chosen["class_path"] == REPLACED:  # torch's Muon takes matrices only
        chosen["class_path"] = "lit_llm.optim.TorchMuon"
    return instantiate_class((groups,), chosen)


def _small_optimizer(config: Namespace, model: GPTConfig | None) -> Optimizer:
    """Build and return the recipe's optimizer for two small parameters, a matrix and a vector.

    Raises:
        UserError: The optimizer cannot be built.
    """
    matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    try:
        optimizer = optimizer_of(config, [{"params": [matrix], "name": "matrix"}, {"params": [vector], "name": "vector"}])
    except (ValueError, TypeError, RuntimeError) as error:
        if not is_mistake(error):
            raise
        message = str(error).rstrip(".")
        flag = "" if "(--" in message else " (--optimizer)"
        raise UserError(f"optimizer {config.optimizer.class_path} cannot be built: {message}{flag}") from error
    if model is not None and model.size_ratios is not None:
        scale_rates(optimizer, *model.size_ratios)
    return optimizer


def _trainer(spec: RunSpec, parts: dict[str, Any], follower: CurveFollower | None, replaced: Mapping[str, Any]) -> Trainer:
    """Build and return the Trainer of a run.

    Raises:
        UserError: The Trainer's settings do not work on this machine, or Lightning refuses them.
    """
    config = spec.config.trainer
    wanted = Namespace({**vars(config), **replaced})
    problem = devices_problem(config.devices) or accelerator_problem(wanted) or launcher_problem(wanted.strategy)
    refuse([*([problem] if problem else name_problems(config)), *logger_problems(wanted.logger)])
    callbacks = [parts[group] for group in CALLBACKS if group in parts]
    try:
        return make_trainer(spec, callbacks, extra_logger=follower, replaced=replaced)
    except Exception as error:  # Lightning raises many types
        if not is_mistake(error):
            raise
        message = " ".join(str(error).split()).rstrip(".")
        if "(--" in message:
            raise UserError(message) from error
        keys = _settings_to_blame(spec, replaced, message)
        flags = ", ".join(f"--trainer.{key}" for key in keys) or "--trainer"
        raise UserError(f"trainer: {message} ({flags})") from error


def _settings_to_blame(spec: RunSpec, replaced: Mapping[str, Any], message: str) -> list[str]:
    """Return the given Trainer settings whose key, or else whose text, is in Lightning's error message; all if none is."""
    named = {key.split(".")[1] for key in spec.given if key.startswith("trainer.")} - replaced.keys()
    values = {key: value for key, value in vars(spec.config.trainer).items() if key in named}
    by_value = [key for key, value in values.items() if isinstance(value, str) and repr(value) in message]
    return [key for key in values if key in message] or by_value or [*values]


def _connect(objects: RunObjects) -> None:
    """Set the DataModule's block size (from the model), batch ramp, number of steps and epochs, and pipeline (from the run)."""
    spec, data, trainer = objects.spec, objects.datamodule, objects.trainer
    model = spec.model
    if model is not None and MODEL_DOMAINS["block_size"].accepts(model.block_size) and getattr(data, "block_size", 0) is None:
        data.block_size = model.block_size
    if not isinstance(data, TokenDataModule):
        if (
            spec.fits
            and trainer is not None
            and isinstance(data, LightningDataModule)
            and not is_overridden("val_dataloader", data)
        ):
            trainer.limit_val_batches = 0  # no validation
        return
    if spec.fits:
        data.find_ramp([objects.parts.get("batch_ramp")] if trainer is None else trainer.callbacks)  # type: ignore[attr-defined]
    if spec.fits and trainer is not None:
        saved = (spec.start if spec.machine is None else spec.machine.start).saved_data(data)
        data.find_run(max_steps=trainer.max_steps, max_epochs=trainer.max_epochs, saved=saved)
    data.find_pipeline(objects.strategy)

"""The objects that a recipe names, built as far as their constructors accept their arguments. No data are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import instantiate_class
from torch.optim import Optimizer

from lit_llm.config.groups import ARCHITECTURE, CALLBACKS
from lit_llm.config.parse_errors import is_mistake, reason
from lit_llm.config.preflight import accelerator_problem, devices_problem, launcher_problem, logger_problems, name_problems
from lit_llm.config.recipe_files import reference_curve
from lit_llm.config.resolve import Run
from lit_llm.config.trainer import make_trainer, trainer_settings
from lit_llm.core.errors import UserError
from lit_llm.data import TokenDataModule
from lit_llm.models.config import MODEL_DOMAINS
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.optim import scale_rates
from lit_llm.optim.torch_muon import REPLACED
from lit_llm.runs.curve_follower import CurveFollower


@dataclass(frozen=True)
class Objects:
    """The objects that were built for a run.

    Attributes:
        parts: the objects of the groups, by group; groups that are off, or could not be built, are missing.
        optimizer: the optimizer for two small parameters.
        strategy: the strategy that trains: the Trainer's, or for another machine, the one that the recipe names.
        problems: why objects are missing, one sentence each.
    """

    parts: dict[str, Any]
    architecture: Architecture | None
    follower: CurveFollower | None
    optimizer: Optimizer | None
    trainer: Trainer | None
    strategy: Any
    problems: tuple[str, ...]

    @property
    def data(self) -> Any:
        return self.parts.get("data")

    @property
    def model(self) -> GPTConfig | None:
        return self.parts.get("model")

    @property
    def ranks(self) -> int:
        """Number of processes that train."""
        return 1 if self.trainer is None else self.trainer.world_size


def make_objects(run: Run, replaced: Mapping[str, Any]) -> Objects:
    """Build the objects that a run names, and let its data follow its model and its Trainer.

    Args:
        replaced: Trainer settings used instead of the recipe's.
    """
    config, machine = run.config, run.machine
    parts, problems = _parts(run)
    follower, optimizer, trainer = None, None, None
    if run.fits and config.check_against is not None and "check_tolerance" not in run.refused:
        try:
            path = reference_curve(config.check_against, run.recipe.arguments.config_files)
            follower = CurveFollower.of_file(path, config.check_tolerance)
        except UserError as error:
            problems += str(error).splitlines()
    if run.recipe.command != "prepare":
        if "optimizer" not in run.refused:
            optimizer, found = _small_optimizer(config, parts.get("model"))
            problems += found
        if not {"trainer", "seed_everything"} & run.refused:
            trainer, found = _trainer(run, parts, follower, replaced)
            problems += found
    strategy = None if trainer is None else trainer.strategy
    if machine is not None and "trainer" not in run.refused:
        strategy = trainer_settings(run.recipe, without=("logger", "callbacks", "profiler", "plugins"))["strategy"]
    architecture = Architecture.of(config.get(ARCHITECTURE))
    made = Objects(parts, architecture, follower, optimizer, trainer, strategy, tuple(problems))
    _connect(run, made)
    return made


def optimizer_of(config: Namespace, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """The recipe's optimizer for parameter groups."""
    chosen = config.optimizer.as_dict()
    if chosen["class_path"] == REPLACED:  # torch's Muon takes matrices only
        chosen["class_path"] = "lit_llm.optim.TorchMuon"
    return instantiate_class((groups,), chosen)


def _parts(run: Run) -> tuple[dict[str, Any], list[str]]:
    """The objects of all groups that can be built, except those whose numbers are refused.

    A model's configuration is built nevertheless, for the rules about several of its numbers.
    """
    parts: dict[str, Any] = {}
    problems: list[str] = []
    for group in ("model", "lora", "objective", "loss", "compute", "data", *CALLBACKS):
        if group in run.refused - {"model"}:
            continue
        try:
            value = run.recipe.parser.instantiate(Namespace({group: run.config[group]})).get(group)
        except Exception as error:  # constructors of torch, Lightning and users raise many types
            if not is_mistake(error):
                raise
            problems.append(reason(str(error)))
            continue
        if value is not None:
            parts[group] = value
    return parts, problems


def _small_optimizer(config: Namespace, model: GPTConfig | None) -> tuple[Optimizer | None, list[str]]:
    """(the optimizer for two small parameters, or None; why it cannot be built)."""
    matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    try:
        optimizer = optimizer_of(config, [{"params": [matrix], "name": "matrix"}, {"params": [vector], "name": "vector"}])
    except (ValueError, TypeError, RuntimeError) as error:
        if not is_mistake(error):
            raise
        message = str(error).rstrip(".")
        flag = "" if "(--" in message else " (--optimizer)"
        return None, [f"optimizer {config.optimizer.class_path} cannot be built: {message}{flag}"]
    if model is not None and model.size_ratios is not None:
        try:
            scale_rates(optimizer, *model.size_ratios)
        except UserError as error:
            return None, [str(error)]
    return optimizer, []


def _trainer(
    run: Run, parts: dict[str, Any], follower: CurveFollower | None, replaced: Mapping[str, Any]
) -> tuple[Trainer | None, list[str]]:
    config = run.config.trainer
    wanted = Namespace({**vars(config), **replaced})
    problem = devices_problem(config.devices) or accelerator_problem(wanted) or launcher_problem(wanted.strategy)
    names = [] if problem else name_problems(config)
    if found := [*([problem] if problem else names), *logger_problems(wanted.logger)]:
        return None, found

    callbacks = [parts[group] for group in CALLBACKS if group in parts]
    try:
        return make_trainer(run, callbacks, extra_logger=follower, replaced=replaced), []
    except Exception as error:  # Lightning raises many types
        if not is_mistake(error):
            raise
        message = " ".join(str(error).split()).rstrip(".")
        if "(--" in message:
            return None, [message]
        keys = _settings_to_blame(run, replaced, message)
        return None, [f"trainer: {message} ({', '.join(f'--trainer.{key}' for key in keys) or '--trainer'})"]


def _settings_to_blame(run: Run, replaced: Mapping[str, Any], message: str) -> list[str]:
    """The settings that a message of Lightning names; all that differ from the defaults if it names none."""
    defaults = vars(run.recipe.parser.get_defaults().trainer)
    changed = [key for key, value in vars(run.config.trainer).items() if key not in replaced and value != defaults[key]]
    return [key for key in changed if key in message] or changed


def _connect(run: Run, made: Objects) -> None:
    """Give the data the settings that they follow: the model's block size, and the run's batch ramp, length and pipeline."""
    data, trainer, model = made.data, made.trainer, made.model
    if model is not None and MODEL_DOMAINS["block_size"].accepts(model.block_size) and getattr(data, "block_size", 0) is None:
        data.block_size = model.block_size
    if not isinstance(data, TokenDataModule):
        return
    if run.fits:
        data.find_ramp([made.parts.get("batch_ramp")] if trainer is None else trainer.callbacks)  # type: ignore[attr-defined]
    if run.fits and trainer is not None:
        saved = (run.start if run.machine is None else run.machine.start).saved_data(data)
        data.find_run(max_steps=trainer.max_steps, max_epochs=trainer.max_epochs, saved=saved)
    data.find_pipeline(made.strategy)

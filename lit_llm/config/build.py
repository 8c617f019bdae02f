"""From a parsed recipe to a model, data and a Trainer. Builds what is cheap, collects every problem, and only then returns.

Every command that takes a recipe calls `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.cli import instantiate_class
from torch.optim import Optimizer

from lit_llm.checkpoint.adapters import base_checkpoint, base_damage, no_base
from lit_llm.checkpoint.average import average_problem
from lit_llm.checkpoint.format import damage_before_load, read_values
from lit_llm.config.auto_precision import AUTO, Choice, choose, keep
from lit_llm.config.constructor_errors import is_mistake
from lit_llm.config.default_callbacks import CALLBACKS
from lit_llm.config.filter_warnings import filter_warnings
from lit_llm.config.groups import ARCHITECTURE
from lit_llm.config.host_memory import memory_problem
from lit_llm.config.null_values import null_problems
from lit_llm.config.optimizer_trial import optimizer_problems
from lit_llm.config.parse import Recipe
from lit_llm.config.parse_errors import reason
from lit_llm.config.preflight import (
    accelerator_problem,
    callback_problems,
    device_problems,
    devices_problem,
    end_problems,
    epoch_problem,
    launcher_problem,
    layout,
    logger_problems,
    optimizer_device_problem,
)
from lit_llm.config.processes import processes_of
from lit_llm.config.ranges import number_problems
from lit_llm.config.reference_curve import reference_curve
from lit_llm.config.resolved_config import settings_of
from lit_llm.config.trainer import make_trainer, trainer_settings
from lit_llm.config.trainer_names import name_problems
from lit_llm.core.batch_sizes import small_note
from lit_llm.core.errors import UserError
from lit_llm.core.ranks import is_rank_zero
from lit_llm.data import TokenDataModule
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.ingest.paths import MissingFiles
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.lora import LoRAConfig, rank_problem, target_problems
from lit_llm.models.loss import LossConfig
from lit_llm.optim import scale_rates
from lit_llm.optim.torch_muon import REPLACED
from lit_llm.plan.settings import devices_of, layout_from_strategy
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.runs.initial_weights import InitialWeights, named_base
from lit_llm.runs.resume import RunStart, choose_run_dir, start_of_evaluation, start_of_fit
from lit_llm.training.language_model import LanguageModel, class_name


@dataclass(frozen=True)
class OtherMachine:
    """Devices that a run is planned for, without having them.

    Attributes:
        devices: how many in total; None: as many as the recipe says.
        per_node: devices in one machine.
        start: the checkpoint that the planned run continues from.
        precision: what trainer.precision auto means there; None: as here.
    """

    devices: int | None = None
    per_node: int = 8
    start: RunStart = field(default_factory=RunStart)
    precision: Choice | None = None

    def devices_for(self, config: Namespace) -> int:
        """The number of devices that a recipe is planned for."""
        return self.devices or devices_of(config.trainer.devices, config.trainer.num_nodes or 1)


@dataclass
class Built:
    """What a recipe describes.

    Attributes:
        config: every setting. The run folder and what follows from resuming are filled in.
        parts: the objects of the groups, by group; groups that are off are missing.
        trainer, model: missing for `prepare`.
        start: the checkpoint that the run continues from.
        initial: the weights that the run starts with; None when it resumes.
        base: the frozen weights of a LoRA run that resumes or is evaluated, known to rank 0.
        missing_data: sentences about data files that are not on this machine. Only with `machine`.
    """

    recipe: Recipe
    config: Namespace
    run_dir: Path
    start: RunStart
    parts: dict[str, Any]
    initial: InitialWeights | None
    base: Path | None = None
    architecture: Architecture | None = None
    follower: CurveFollower | None = None
    missing_data: list[str] = field(default_factory=list)
    _trainer: Trainer | None = None
    _model: LanguageModel | None = None

    @property
    def datamodule(self) -> Any:
        return self.parts.get("data")

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    @property
    def ranks(self) -> int:
        """The processes that train."""
        return 1 if self._trainer is None else self._trainer.world_size

    @property
    def model(self) -> LanguageModel:
        assert self._model is not None
        return self._model

    def make_optimizer(self, groups: Iterable[dict[str, Any]]) -> Optimizer:
        """The recipe's optimizer for parameter groups."""
        chosen = self.config.optimizer.as_dict()
        if chosen["class_path"] == REPLACED:  # it takes matrices only
            chosen["class_path"] = "lit_llm.optim.TorchMuon"
        return instantiate_class((groups,), chosen)


def build(
    recipe: Recipe,
    *,
    run_dir: Path | None = None,
    trainer: Mapping[str, Any] | None = None,
    machine: OtherMachine | None = None,
) -> Built:
    """Build everything that a recipe describes. Nothing is written, and no data is read.

    Args:
        run_dir: a folder for a run that is thrown away: it never resumes. None: the folder that the recipe says.
        trainer: Trainer settings used instead of the recipe's.
        machine: check the layout for these devices instead of this machine's, and accept that data files are missing here.

    Raises:
        UserError: Everything that is wrong with the recipe, one sentence a line.
    """
    filter_warnings()
    config, problems = recipe.config, recipe.problems
    if nulls := null_problems(recipe):
        raise UserError("\n".join(dict.fromkeys([*problems, *nulls])))
    numbers = number_problems(config, recipe.given)
    problems += numbers.values()
    refused = {key.partition(".")[0] for key in numbers}
    if "seed_everything" not in refused:
        config.seed_everything = _seed(config.seed_everything)
    scratch = run_dir is not None
    if run_dir is None:
        run_dir, start = _choose_start(recipe)
    else:
        start = RunStart()
    if recipe.initial_problems and start.checkpoint is None:  # the model depends on these weights
        raise UserError("\n".join([*problems, *recipe.initial_problems]))
    if config.trainer.precision == AUTO and recipe.command != "prepare":
        line = _choose_precision(config, start, machine)
        recipe.notes += [line] if recipe.command == "fit" and machine is None and not scratch else []
    built = Built(recipe, config, run_dir, start, _parts(recipe, refused), recipe.initial)
    if not isinstance(built.datamodule, TokenDataModule) and "trainer.use_distributed_sampler" not in recipe.given:
        config.trainer.use_distributed_sampler = True  # other DataModules do not split samples over ranks
    problems += _model_problems(built)
    if recipe.command == "fit" and "check_tolerance" not in refused:
        problems += _follow_curve(built)
    optimizer = None
    if recipe.command != "prepare":
        if "optimizer" not in refused:
            optimizer, found = _try_optimizer(built)
            problems += found
        if not {"trainer", "seed_everything"} & refused:
            problems += _make_trainer(built, trainer or {}, scratch)
        if optimizer is not None and recipe.command == "fit" and "trainer" not in refused:
            problems += optimizer_problems(_strategy(built, machine), built.make_optimizer, config.optimizer.class_path)
    problems += _data_problems(built, machine)
    problems += _checkpoint_problems(built, optimizer)
    recipe.raise_problems()
    if recipe.command == "fit" and machine is None:
        # `check` reduces the batch.
        problem = memory_problem(config, built.parts, built.architecture, built.trainer, cut=scratch)
        if problem is not None:
            raise UserError(problem)
    if built._trainer is not None:
        parts = built.parts
        init_from = built.base if built.initial is None else built.initial.checkpoint
        built._model = LanguageModel(
            parts["model"],
            built.make_optimizer,
            parts["loss"],
            parts["compute"],
            init_from,
            built.architecture,
            parts.get("lora"),
            use_ema=_uses_average(built),
        )
    return built


def _seed(seed: Any) -> Any:
    """Seed this process. true: with a random seed, which is returned; false: not at all."""
    if seed is False:
        return seed
    return seed_everything(None if seed is True else seed, workers=True)


def _choose_start(recipe: Recipe) -> tuple[Path, RunStart]:
    """The run folder and the checkpoint to continue from. Fills in what follows from them in the configuration."""
    config, command = recipe.config, recipe.command
    resume = config.resume if command == "fit" else "never"
    run_dir = choose_run_dir(config.run_dir, resume, recipe.arguments.config_files)
    config.run_dir = str(run_dir)
    start = RunStart()
    ranks = processes_of(config.trainer)
    try:
        if command in ("validate", "test"):
            start = start_of_evaluation(run_dir, config.ckpt_path, ranks=ranks)
        elif command == "fit":
            steps = config.additional_steps
            start = start_of_fit(run_dir, resume, replace=config.replace, additional_steps=steps, ranks=ranks)
            if resume == "auto" and start.checkpoint is None:
                recipe.notes.append(
                    f"{run_dir} has no checkpoint to continue from, so training starts at step 1 (--resume auto)"
                )
            config.resume = start.resume
            if start.max_steps is not None:
                config.trainer.max_steps = start.max_steps
    except UserError as error:
        recipe.problems += str(error).splitlines()
    return run_dir, start


def _choose_precision(config: Namespace, start: RunStart, machine: OtherMachine | None) -> str:
    """Replace trainer.precision auto, so that the run records a value; returns the line to print."""
    here = choose(config.trainer.accelerator) if machine is None or machine.precision is None else machine.precision
    choice = keep(start if machine is None else machine.start, here)
    config.trainer.precision = choice.precision
    return choice.line


def _parts(recipe: Recipe, refused: set[str]) -> dict[str, Any]:
    """The objects of all groups that can be built, except those whose numbers are refused.

    A model's configuration is built nevertheless, for the rules about several of its numbers.
    """
    parts: dict[str, Any] = {}
    for group in ("model", "lora", "loss", "compute", "data", *CALLBACKS):
        if group in refused - {"model"}:
            continue
        try:
            value = recipe.parser.instantiate(Namespace({group: recipe.config[group]})).get(group)
        except Exception as error:  # of torch's, Lightning's and users' constructors
            if not is_mistake(error):
                raise
            recipe.problems.append(reason(str(error)))
            continue
        if value is not None:
            parts[group] = value
    return parts


def _model_problems(built: Built) -> list[str]:
    parts, found = built.parts, []
    model: GPTConfig | None = parts.get("model")
    if model is not None:
        numbers = built.recipe.problems  # the ranges of the model's numbers have been checked
        found += [problem for problem in model.problems() if problem not in numbers]
        found += _share_block_size(model, built.datamodule) if not found else []
    for group in ("loss", "compute"):
        found += parts[group].problems() if group in parts else []
    built.architecture = Architecture.of(built.config.get(ARCHITECTURE))
    if built.architecture is not None and {"model", "loss", "compute"} <= parts.keys():
        found += built.architecture.problems(parts["model"], parts["loss"].chunk_size, parts["compute"])
    return found + _lora_problems(built)


def _lora_problems(built: Built) -> list[str]:
    parts, architecture = built.parts, built.architecture
    lora: LoRAConfig | None = parts.get("lora")
    model: GPTConfig | None = parts.get("model")
    if lora is None:
        return []
    if architecture is not None:
        return [f"lora adapts the linear layers of lit_llm's GPT only, not those of {architecture.class_path} (--lora null)"]
    found = []
    if built.recipe.command == "fit" and built.initial is None and built.start.checkpoint is None:
        found.append("lora trains adapters beside frozen weights: name the run or the import that has them (--init_from RUN)")
    if "compute" in parts and parts["compute"].float8:
        found.append("lora does not work with compute.float8, which replaces the layers (--compute.float8 false)")
    if model is not None and not model.problems():
        found += target_problems(lora, model)
        # An adapter of the package peft may have any rank. It is evaluated as it is.
        if built.recipe.command == "fit" and (problem := rank_problem(lora, model)) is not None:
            found.append(problem)
    return found


def _share_block_size(model: GPTConfig, data: Any) -> list[str]:
    """Set the length of sequences to the model's, unless the recipe sets a shorter one."""
    if not hasattr(data, "block_size"):
        return []
    if data.block_size is None:
        data.block_size = model.block_size
    if data.block_size > model.block_size:
        return [
            f"data.block_size={data.block_size} is longer than model.block_size={model.block_size} "
            "(--data.block_size, or leave it null to follow the model)"
        ]
    return []


def _follow_curve(built: Built) -> list[str]:
    config = built.config
    if config.check_against is None:
        return []
    try:
        path = reference_curve(config.check_against, built.recipe.arguments.config_files)
        built.follower = CurveFollower.of_file(path, config.check_tolerance)
    except UserError as error:
        return str(error).splitlines()
    return []


def _try_optimizer(built: Built) -> tuple[Optimizer | None, list[str]]:
    """The optimizer for two small parameters, or why it cannot be built."""
    matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    model: GPTConfig | None = built.parts.get("model")
    try:
        optimizer = built.make_optimizer([{"params": [matrix], "name": "matrix"}, {"params": [vector], "name": "vector"}])
    except (ValueError, TypeError, RuntimeError) as error:
        if not is_mistake(error):
            raise
        message = str(error).rstrip(".")
        flag = "" if "(--" in message else " (--optimizer)"
        return None, [f"optimizer {built.config.optimizer.class_path} cannot be built: {message}{flag}"]
    if model is not None and model.size_ratios is not None:
        try:
            scale_rates(optimizer, *model.size_ratios)
        except UserError as error:
            return None, [str(error)]
    return optimizer, []


def _make_trainer(built: Built, replaced: Mapping[str, Any], scratch: bool) -> list[str]:
    config = built.config.trainer
    wanted = Namespace({**vars(config), **replaced})
    problem = devices_problem(config.devices) or accelerator_problem(wanted) or launcher_problem(wanted.strategy)
    names = [] if problem else name_problems(config)
    if found := [*([problem] if problem else names), *logger_problems(wanted.logger)]:
        return found

    def make(replaced: Mapping[str, Any]) -> Trainer:
        return make_trainer(
            built.recipe,
            [built.parts[group] for group in CALLBACKS if group in built.parts],
            run_dir=built.run_dir,
            start=built.start,
            extra_logger=built.follower,
            replaced=replaced,
            scratch=scratch,
        )

    try:
        built._trainer = make(replaced)
    except Exception as error:  # Lightning raises many types
        if not is_mistake(error):
            raise
        message = " ".join(str(error).split()).rstrip(".")
        if "(--" in message:
            return [message]
        keys = _settings_to_blame(built.recipe, replaced, make)
        return [f"trainer: {message} ({', '.join(f'--trainer.{key}' for key in keys) or '--trainer'})"]
    if built.recipe.command != "fit":
        return []
    found = callback_problems(built.trainer, built.datamodule)
    if not getattr(built.datamodule, "needs_max_steps", False):  # such data refuse a run without it in their own words
        found += end_problems(built.trainer)
    return found


def _settings_to_blame(recipe: Recipe, replaced: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Trainer]) -> list[str]:
    """The settings without each of which the Trainer can be built; all that differ from the defaults if there is none."""
    defaults = vars(recipe.parser.get_defaults().trainer)
    changed = [key for key, value in vars(recipe.config.trainer).items() if key not in replaced and value != defaults[key]]
    guilty = []
    for key in changed:
        try:
            make({**replaced, key: defaults[key]})
        except Exception:  # another setting is wrong, or this one is needed
            continue
        guilty.append(key)
    return guilty or changed


def _data_problems(built: Built, machine: OtherMachine | None) -> list[str]:
    """What is wrong with the layout over devices, and with the data for that layout."""
    data, trainer = built.datamodule, built._trainer
    if isinstance(data, TokenDataModule) and built.recipe.command == "fit":
        chosen = [built.parts.get("batch_ramp")] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
        data.find_ramp(chosen)
        if trainer is not None:
            saved = (built.start if machine is None else machine.start).saved_data(data)
            data.find_run(max_steps=trainer.max_steps, max_epochs=trainer.max_epochs, saved=saved)
    ranks: int | None = 1
    found: list[str] = []
    if trainer is not None:
        ranks, found = _layout(built, trainer) if machine is None else _planned_layout(built, machine)
    if ranks is None or not hasattr(data, "problems"):
        return found
    if isinstance(data, TokenDataModule):
        data.find_pipeline(_strategy(built, machine))
    problems = data.problems(ranks)
    if not problems and isinstance(data, TokenDataModule) and trainer is not None:
        problem = epoch_problem(trainer, data, ranks)
        problems += [problem] if problem else []
        if built.recipe.command == "fit":
            ramp, length = data.ramp, data.block_size
            sizes = {data.global_batch_size} if ramp is None or not length else {size for _, size in ramp.sequences(length)}
            for size in sorted(sizes):
                built.recipe.notes += small_note(size, data.micro_batch_size, ranks, data.pipeline)
    if machine is not None:
        built.missing_data = [problem for problem in problems if isinstance(problem, MissingFiles)]
    return [*found, *(problem for problem in problems if problem not in built.missing_data)]


def _layout(built: Built, trainer: Trainer) -> tuple[int | None, list[str]]:
    ranks, found = layout(trainer.strategy, trainer.world_size, *_laid_out(built))
    model = built.parts.get("model") if built.architecture is None else None
    found += device_problems(trainer, built.parts.get("compute"), model)
    if built.recipe.command != "fit":
        return ranks, found
    problem = optimizer_device_problem(trainer, built.config.optimizer)
    return ranks, [*found, problem] if problem else found


def _laid_out(built: Built) -> tuple[GPTConfig | None, Architecture | None, ComputeConfig | None, str, LossConfig | None]:
    """What decides whether a layout works, beside the layout."""
    parts = built.parts
    precision = str(built.config.trainer.precision)
    return parts.get("model"), built.architecture, parts.get("compute"), precision, parts.get("loss")


def _strategy(built: Built, machine: OtherMachine | None) -> Any:
    """The strategy that trains: the trainer's, or what the recipe names for another machine."""
    if machine is not None:
        return trainer_settings(built.recipe, without=("logger", "callbacks", "profiler", "plugins"))["strategy"]
    return None if built._trainer is None else built._trainer.strategy


def _planned_layout(built: Built, machine: OtherMachine) -> tuple[int | None, list[str]]:
    devices = machine.devices_for(built.config)
    strategy = _strategy(built, machine)
    if isinstance(strategy, MeshStrategy):
        return layout(strategy, devices, *_laid_out(built))
    try:
        return layout_from_strategy(strategy_of(built.config), devices, machine.per_node).data_parallel, []
    except UserError as error:
        return None, [str(error)]


def strategy_of(config: Namespace) -> Any:
    """The recipe's trainer.strategy: a name, or a dict of class_path and init_args."""
    strategy = config.trainer.strategy
    return strategy.as_dict() if isinstance(strategy, Namespace) else strategy


def _find_base(built: Built, checkpoint: Path) -> list[str]:
    """Set the base weights of the checkpoint of a LoRA run, or say why they cannot be used.

    init_from names them, as when the run began. If that folder is gone, the checkpoint knows where they were.
    """
    path = built.config.init_from
    named = named_base(path) if path is not None and Path(path).exists() else None
    try:
        built.base = base_checkpoint(read_values(checkpoint), checkpoint, named)
    except UserError as error:
        return [str(error)]
    damage = damage_before_load(built.base, ranks=built.ranks) or base_damage(read_values(built.base), built.base)
    return [damage] if damage else []


def _unused_base(built: Built, checkpoint: Path) -> list[str]:
    """An evaluation's --init_from names base weights of adapters. In recipes, and to resume, it is where the run began."""
    is_named = built.recipe.arguments.asks_for("init_from") is not None and built.config.init_from is not None
    return [no_base(checkpoint)] if is_named and built.recipe.command != "fit" else []


def _uses_average(built: Built) -> bool:
    """Whether --use_ema applies. In the recipe of a run that is evaluated, it was about the run's --init_from."""
    recipe = built.recipe
    return bool(built.config.use_ema) and (recipe.command == "fit" or recipe.arguments.asks_for("use_ema") is not None)


def _average_problems(built: Built, checkpoint: Path) -> list[str]:
    """Why the average of the weights in a checkpoint cannot be used, if it is asked for."""
    if not _uses_average(built) or not is_rank_zero():
        return []
    if built.recipe.command == "fit" and built.parts.get("lora") is not None:
        return ["lora needs weights that a checkpoint holds as such: write the average with `consolidate --ema` (--use_ema)"]
    problem = average_problem(read_values(checkpoint), checkpoint, "--use_ema")
    return [problem] if problem else []


def _checkpoint_problems(built: Built, optimizer: Optimizer | None) -> list[str]:
    """Why the checkpoint to continue from, or the initial weights, do not fit the recipe."""
    model: GPTConfig | None = built.parts.get("model")
    checkpoint = built.start.checkpoint
    if checkpoint is not None:
        built.initial = None
        accepted = built.recipe.command == "fit" and built.config.accept_changes
        optimizer_class = None if optimizer is None else class_name(optimizer)
        settings = built.start.setting_changes(settings_of(built.recipe), built.datamodule, accepted=accepted)
        built.start = replace(built.start, announced=tuple(settings.announced))
        lora: LoRAConfig | None = built.parts.get("lora")
        found = built.start.changes(model, built.architecture, lora, optimizer_class, built.datamodule, accepted=accepted)
        if is_rank_zero() and not found:
            found += _find_base(built, checkpoint) if lora is not None else _unused_base(built, checkpoint)
        if built.recipe.command != "fit" and not found:
            found += _average_problems(built, checkpoint)
        return [*found, *settings.refused]
    if built.initial is None:
        return []
    found = [] if model is None else built.initial.model_problems(model, built.architecture)
    damage = built.initial.damage(ranks=built.ranks)
    return [*found, damage] if damage else [*found, *_average_problems(built, built.initial.checkpoint)]

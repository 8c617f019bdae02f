"""Decides the settings of a launch before anything is built: its folder, where it starts and ends, its seed and precision."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import seed_everything

from lit_llm.config.arguments import Arguments, read
from lit_llm.config.groups import LAUNCH_ONLY, Command
from lit_llm.config.parse import Recipe, parse
from lit_llm.config.parser import find_class
from lit_llm.config.ranges import null_problems, number_problems
from lit_llm.config.warmup import keep_warmup
from lit_llm.core.errors import UserError
from lit_llm.core.ranks import launched_ranks
from lit_llm.core.yaml_reading import dump_yaml, read_yaml
from lit_llm.data import TokenDataModule
from lit_llm.runs.init_from import InitialWeights
from lit_llm.runs.resume import RunStart, choose_run_dir, start_of_evaluation, start_of_fit
from lit_llm.runs.run_folder import expanded
from lit_llm.training.auto_precision import AUTO, Choice, choose, keep


@dataclass(frozen=True)
class OtherMachine:
    """Devices that a run is planned for, which need not be here.

    Attributes:
        devices: total number of devices; None: the recipe's number.
        per_node: number of devices in one machine.
        start: the checkpoint that the planned run continues from.
        precision: the meaning of trainer.precision auto on that machine; None: as on this machine.
    """

    devices: int | None = None
    per_node: int = 8
    start: RunStart = field(default_factory=RunStart)
    precision: Choice | None = None

    def devices_for(self, config: Namespace) -> int:
        """The number of devices that a recipe is planned for."""
        return self.devices or devices_of(config.trainer.devices, config.trainer.num_nodes or 1)


@dataclass(frozen=True)
class Run:
    """A launch. The code that builds and checks objects reads it, and nothing changes it.

    Attributes:
        recipe: the recipe with the settings that the launch decides: run_dir, resume, seed_everything, and the Trainer's
            precision, max_steps, max_epochs and use_distributed_sampler.
        start: the checkpoint that the run continues from, with the changed settings that it announces.
        scratch: whether the run is thrown away: it then never resumes, and its checkpoints are not sharded.
        machine: the devices that the run is planned for; None: this machine.
        refused: groups with a number outside its range. They are not built.
        problems: the problems of the recipe so far, one sentence each.
        notes: sentences to print if there are no problems.
    """

    recipe: Recipe
    run_dir: Path
    start: RunStart
    scratch: bool
    machine: OtherMachine | None
    refused: frozenset[str]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def config(self) -> Namespace:
        return self.recipe.config

    @property
    def fits(self) -> bool:
        return self.recipe.command == "fit"

    @property
    def log_dir(self) -> Path | None:
        """The folder for a log of each rank.

        Raises:
            UserError: Its path has an environment variable that is not set.
        """
        named = self.config.log_dir
        return None if named is None else expanded(named, key="log_dir", flag="--log_dir DIR")

    @property
    def initial(self) -> InitialWeights | None:
        """The weights that the run starts with; None when it resumes."""
        return None if self.start.checkpoint is not None else self.recipe.initial

    @property
    def lacks_weights(self) -> bool:
        """Whether training would start from random weights. A plan needs none if the recipe describes the model."""
        starts = self.fits and self.recipe.initial is None and self.start.checkpoint is None
        return starts and not (self.machine is not None and self.recipe.describes_model)

    @property
    def uses_average(self) -> bool:
        """Whether --use_ema applies. In the recipe of a run that is evaluated, it was about the run's --init_from."""
        return bool(self.config.use_ema) and (self.fits or self.recipe.arguments.asks_for("use_ema") is not None)


def read_recipe(command: Command, arguments: Arguments | list[str], *, weights: Path | None = None) -> Recipe:
    """The parsed recipe. The weights that `init_from` names give the defaults of the model and the tokenizer.

    Args:
        weights: for `prepare`: the teacher, whose block size and tokenizer are the defaults.

    Raises:
        UserError: The reasons of `parse`, or `init_from` is not a path.
    """
    arguments = read(arguments) if isinstance(arguments, list) else arguments
    named = weights or (arguments.value_of("init_from") if command == "fit" else None)
    if named in (None, "null"):
        return parse(command, arguments)
    if not isinstance(named, str | Path):
        raise UserError(f"init_from is {named!r}, but must be the path of a run folder or checkpoint (--init_from)")
    try:
        initial = InitialWeights.find(Path(named))
    except UserError as error:
        return replace(parse(command, arguments), initial_problems=str(error).splitlines())
    return replace(parse(command, arguments, initial.defaults()), initial=initial)


def resolved(arguments: Arguments | list[str]) -> str:
    """The configuration that `fit` would use, with base, overlays and defaults filled in, as YAML that runs as it is.

    Raises:
        UserError: The arguments have problems; the text has a sentence for each.
    """
    recipe = read_recipe("fit", arguments)
    recipe.raise_problems()
    text = recipe.as_yaml(without=("resume", *LAUNCH_ONLY))
    if not recipe.initial_problems:
        return text
    # The model follows from weights that are not on this machine. Only settings of the recipe are known.
    values = read_yaml(text)
    values["model"] = {key: value for key, value in values["model"].items() if f"model.{key}" in recipe.given}
    return dump_yaml(values)


def resolve(recipe: Recipe, *, run_dir: Path | None = None, machine: OtherMachine | None = None) -> Run:
    """Decide the settings of a launch. Seeds this process.

    Args:
        run_dir: the folder of a run that is thrown away. None: the folder that the recipe names.

    Raises:
        UserError: A value is null that must not be, or the weights that the model depends on cannot be used.
    """
    config, problems, notes = recipe.config.clone(), [*recipe.problems], [*recipe.notes]
    assert recipe.command != "fit" or not config.init_from or recipe.initial or recipe.initial_problems, "use read_recipe"
    if nulls := null_problems(recipe.command, config):
        raise UserError("\n".join(dict.fromkeys([*problems, *nulls])))
    numbers = number_problems(config, recipe.given)
    problems += numbers.values()
    refused = frozenset(key.partition(".")[0] for key in numbers)
    if "seed_everything" not in refused and config.seed_everything is not False:
        seed = config.seed_everything
        config.seed_everything = seed_everything(None if seed is True else seed, workers=True)
    start, scratch = RunStart(), run_dir is not None
    if run_dir is None:
        run_dir = choose_run_dir(
            config.run_dir, config.resume if recipe.command == "fit" else "never", recipe.arguments.config_files
        )
        config.run_dir = str(run_dir)
        try:
            start = _start(recipe, config, run_dir)
        except UserError as error:
            problems += str(error).splitlines()
        else:
            if recipe.command == "fit" and config.resume == "auto" and start.checkpoint is None:
                notes.append(f"{run_dir} has no checkpoint to continue from, so training starts at step 1 (--resume auto)")
            if recipe.command == "fit":
                config.resume = start.resume
            if start.max_steps is not None:
                config.trainer.max_steps, config.trainer.max_epochs = start.max_steps, -1
    if recipe.warmup is not None and recipe.command == "fit":
        notes += keep_warmup(recipe.warmup, config, (start if machine is None else machine.start).saved)
    if recipe.initial_problems and start.checkpoint is None:
        if machine is None or not recipe.describes_model:  # the model depends on these weights
            raise UserError("\n".join([*problems, *recipe.initial_problems]))
        notes += [f"planned without the weights that training starts from: {problem}" for problem in recipe.initial_problems]
    if config.trainer.precision == AUTO and recipe.command != "prepare":
        here = choose(config.trainer.accelerator) if machine is None or machine.precision is None else machine.precision
        choice = keep(start if machine is None else machine.start, here)
        config.trainer.precision = choice.precision
        notes += [choice.line] if recipe.command == "fit" and machine is None and not scratch else []
    data = find_class("data", config.data.get("class_path"))
    of_tokens = data is not None and issubclass(data, TokenDataModule)
    if not of_tokens and "trainer.use_distributed_sampler" not in recipe.given:
        config.trainer.use_distributed_sampler = True  # other DataModules do not split samples over ranks
    settled = replace(recipe, config=config)
    if start.step is not None:
        changes, announced = start.setting_changes(settled.settings(), compares_data=of_tokens, accepted=config.accept_changes)
        start = replace(start, announced=tuple(announced))
        problems += changes
    return Run(settled, run_dir, start, scratch, machine, refused, tuple(problems), tuple(notes))


def _start(recipe: Recipe, config: Namespace, run_dir: Path) -> RunStart:
    """The checkpoint to continue from, or to evaluate."""
    ranks = processes_of(config.trainer)
    if recipe.command in ("validate", "test"):
        return start_of_evaluation(run_dir, config.ckpt_path, ranks=ranks)
    if recipe.command == "fit":
        steps = config.additional_steps
        return start_of_fit(run_dir, config.resume, replace=config.replace, additional_steps=steps, ranks=ranks)
    return RunStart()


def device_numbers(devices: Any) -> tuple[list[int], bool]:
    """(numbers in trainer.devices, whether they list devices instead of giving a count).

    Raises:
        ValueError: an entry is no number.
    """
    entries = devices if isinstance(devices, list) else str(devices).split(",")
    return [int(entry) for entry in entries if str(entry).strip()], isinstance(devices, list) or "," in str(devices)


def devices_of(devices: Any, nodes: int) -> int:
    """Number of devices that trainer.devices asks for on `nodes` nodes. "auto", -1, None and mistakes count as one device."""
    try:
        numbers, listed = device_numbers(devices)
    except ValueError:
        return nodes
    return max(1, len(numbers) if listed else sum(numbers)) * nodes


def processes_of(trainer: Namespace) -> int:
    """Number of processes of a launch: those of torchrun or SLURM, or those that Lightning will start for `trainer`."""
    if (launched := launched_ranks()) is not None:
        return launched
    nodes = max(1, trainer.num_nodes or 1)
    if str(trainer.devices) in ("auto", "-1", "None") and trainer.accelerator != "cpu" and torch.accelerator.is_available():
        return torch.accelerator.device_count() * nodes
    return devices_of(trainer.devices, nodes)

"""Resolve the settings of a run before its objects are built: run folder, starting checkpoint, last step, seed, precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import seed_everything

from lit_llm.config.arguments import Arguments, read
from lit_llm.config.devices import OtherMachine, processes_of
from lit_llm.config.groups import LAUNCH_ONLY, Command
from lit_llm.config.parse import parse
from lit_llm.config.parser import find_class
from lit_llm.config.ranges import null_problems, number_problems
from lit_llm.config.run_spec import RunSpec
from lit_llm.config.warmup import keep_warmup
from lit_llm.core.errors import UserError, noting
from lit_llm.core.yaml_reading import dump_yaml, read_yaml
from lit_llm.data import TokenDataModule
from lit_llm.runs.init_from import InitialWeights
from lit_llm.runs.resume import RunStart, choose_run_dir, start_of_evaluation, start_of_fit
from lit_llm.training.auto_precision import AUTO, choose, keep
from lit_llm.training.filter_warnings import filter_warnings


def read_spec(command: Command, arguments: Arguments | list[str], *, weights: Path | None = None) -> RunSpec:
    """Return the run that `arguments` describe. The weights in `init_from` determine defaults of the model and the tokenizer.

    Args:
        weights: for `prepare`: the path of the teacher, whose block size and tokenizer are the defaults.

    Raises:
        UserError: A recipe file cannot be read, `init_from` is not a path, or a mistake concerns no single value.
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
        return replace(parse(command, arguments), unusable_weights=tuple(str(error).splitlines()))
    return replace(parse(command, arguments, initial.defaults()), named_weights=initial)


def resolved(arguments: Arguments | list[str]) -> str:
    """Return the configuration that `fit` would use, with base, overlays and defaults merged, as the YAML of one recipe.

    Raises:
        UserError: The arguments have problems; the text has a sentence for each.
    """
    spec = read_spec("fit", arguments)
    spec.raise_problems()
    text = spec.as_yaml(without=("resume", *LAUNCH_ONLY))
    if not spec.unusable_weights:
        return text
    # The model's defaults come from weights that cannot be read. Only the settings of the recipe and flags are known.
    values = read_yaml(text)
    values["model"] = {key: value for key, value in values["model"].items() if f"model.{key}" in spec.given}
    return dump_yaml(values)


def decide(spec: RunSpec, *, run_dir: Path | None = None, machine: OtherMachine | None = None) -> RunSpec:
    """Return `spec` with run folder, start, last step, seed, precision and warmup resolved. Seeds this process.

    Args:
        run_dir: the folder of a trial run, whose results are discarded. None: the folder that the spec names.
        machine: the devices for which the run is planned; None: this machine.

    Raises:
        UserError: A value is null that must not be, or the weights that determine the model cannot be used.
    """
    filter_warnings()
    config, problems, notes = spec.config.clone(), [*spec.problems], [*spec.notes]
    assert not spec.fits or not config.init_from or spec.named_weights or spec.unusable_weights, "use read_spec"
    if nulls := null_problems(spec.command, config):
        raise UserError("\n".join(dict.fromkeys([*problems, *nulls])))
    numbers = number_problems(config, spec.given)
    problems += numbers.values()
    refused = frozenset(key.partition(".")[0] for key in numbers)
    if "seed_everything" not in refused and config.seed_everything is not False:
        seed = config.seed_everything
        config.seed_everything = seed_everything(None if seed is True else seed, workers=True)
    start, scratch = RunStart(), run_dir is not None
    if run_dir is None:
        run_dir = choose_run_dir(config.run_dir, config.resume if spec.fits else "never", spec.arguments.config_files)
        config.run_dir = str(run_dir)
        try:
            start = _start(spec, config, run_dir)
        except UserError as error:
            problems += str(error).splitlines()
        else:
            if spec.fits and config.resume == "auto" and start.checkpoint is None:
                notes.append(f"{run_dir} has no checkpoint to continue from, so training starts at step 1 (--resume auto)")
            if spec.fits:
                config.resume = start.resume
            if start.max_steps is not None:
                config.trainer.max_steps, config.trainer.max_epochs = start.max_steps, -1
    if spec.warmup is not None and spec.fits:
        notes += keep_warmup(spec.warmup, config, (start if machine is None else machine.start).saved)
    if spec.unusable_weights and start.checkpoint is None:
        if machine is None or not spec.describes_model:  # the unusable weights determine the model
            raise UserError("\n".join([*problems, *spec.unusable_weights]))
        notes += [f"planned without the weights that training starts from: {problem}" for problem in spec.unusable_weights]
    if config.trainer.precision == AUTO and spec.command != "prepare":
        here = choose(config.trainer.accelerator) if machine is None or machine.precision is None else machine.precision
        choice = keep(start if machine is None else machine.start, here)
        config.trainer.precision = choice.precision
        notes += [choice.line] if spec.fits and machine is None and not scratch else []
    data = find_class("data", config.data.get("class_path"))
    of_tokens = data is not None and issubclass(data, TokenDataModule)
    if not of_tokens and "trainer.use_distributed_sampler" not in spec.given:
        config.trainer.use_distributed_sampler = True  # other DataModules do not split samples over ranks
    spec = replace(spec, config=config, run_dir=run_dir, scratch=scratch, machine=machine, refused=refused, notes=tuple(notes))
    if start.step is not None:
        changes, announced = start.setting_changes(spec.settings(), compares_data=of_tokens, accepted=config.accept_changes)
        start = replace(start, announced=tuple(announced))
        problems += changes
    built: dict[str, Any] = {}
    for group in ("model", "lora", "loss", "compute"):
        if group == "model" or group not in refused:  # a refused model, too: for the rules about several of its numbers
            with noting(problems):
                built[group] = spec.build(group)
    return replace(spec, start=start, problems=tuple(problems), **built)


def _start(spec: RunSpec, config: Namespace, run_dir: Path) -> RunStart:
    """Return the checkpoint that `fit` continues, or that `validate` and `test` evaluate."""
    ranks = processes_of(config.trainer)
    if spec.command in ("validate", "test"):
        return start_of_evaluation(run_dir, config.ckpt_path, ranks=ranks)
    if spec.fits:
        steps = config.additional_steps
        return start_of_fit(run_dir, config.resume, replace=config.replace, additional_steps=steps, ranks=ranks)
    return RunStart()

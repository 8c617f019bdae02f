"""From a parsed recipe to a model, data and a Trainer: decides the settings of the run, builds all cheap objects, checks
everything, and only then builds the model.

Every command that takes a recipe calls `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer

from lit_llm.config import checks
from lit_llm.config.objects import Objects, make_objects, optimizer_of
from lit_llm.config.optimizer_trial import optimizer_problems
from lit_llm.config.parse import Recipe
from lit_llm.config.resolve import OtherMachine, Run, resolve
from lit_llm.core.errors import UserError
from lit_llm.ingest.paths import MissingFiles
from lit_llm.training.filter_warnings import filter_warnings
from lit_llm.training.language_model import LanguageModel

ONE_DEVICE: Mapping[str, Any] = {"devices": 1, "num_nodes": 1, "strategy": "auto", "logger": False}
"""Trainer settings of a run that is thrown away."""
MemoryProblem = Callable[[Run, Objects], str | None]


@dataclass(frozen=True)
class Built:
    """A run and its objects.

    Attributes:
        missing_data: sentences about data files that are not on this machine. Only with `machine`.
    """

    run: Run
    objects: Objects
    missing_data: list[str]
    _model: LanguageModel | None

    @property
    def config(self) -> Namespace:
        """Every setting, with the run folder and the settings that follow from resuming filled in."""
        return self.run.config

    @property
    def parts(self) -> dict[str, Any]:
        return self.objects.parts

    @property
    def datamodule(self) -> Any:
        return self.objects.data

    @property
    def trainer(self) -> Trainer:
        """The Trainer; `prepare` has none."""
        assert self.objects.trainer is not None
        return self.objects.trainer

    @property
    def model(self) -> LanguageModel:
        """The model; `prepare` has none."""
        assert self._model is not None
        return self._model


def build(
    recipe: Recipe,
    *,
    run_dir: Path | None = None,
    trainer: Mapping[str, Any] | None = None,
    machine: OtherMachine | None = None,
    memory: MemoryProblem | None = None,
) -> Built:
    """Build everything that a recipe describes. Nothing is written, and no data is read.

    Args:
        run_dir: a folder for a run that is thrown away, and never resumes. None: the folder that the recipe names.
        trainer: Trainer settings used instead of the recipe's.
        machine: check the layout for these devices instead of this machine's, and accept that data files are missing here.
        memory: says why a run of `fit` does not fit into memory (`lit_llm.plan.host_memory`).

    Raises:
        UserError: The recipe has problems; the text has one sentence a line for each.
    """
    filter_warnings()
    run = resolve(recipe, run_dir=run_dir, machine=machine)
    made, make_optimizer = make_objects(run, trainer or {}), partial(optimizer_of, run.config)
    problems = [*run.problems, *made.problems, *checks.model_problems(run, made), *checks.training_problems(run, made)]
    if run.fits and made.optimizer is not None and "trainer" not in run.refused:
        problems += optimizer_problems(made.strategy, make_optimizer, run.config.optimizer.class_path)
    of_data = checks.data_problems(run, made)
    missing: list[str] = [problem for problem in of_data if machine is not None and isinstance(problem, MissingFiles)]
    problems += [problem for problem in of_data if problem not in missing]
    changes = checks.checkpoint_problems(run, made)
    base, of_base = (None, []) if changes else checks.base_of_adapters(run, made)
    problems += [*changes, *of_base, *([] if changes else checks.evaluation_problems(run, made))]
    problems += checks.initial_problems(run, made)
    notes = [*run.notes, *([] if problems or missing else checks.batch_notes(run, made))]
    replace(run.recipe, problems=problems, notes=notes).raise_problems()
    if memory is not None and run.fits and (problem := memory(run, made)):
        raise UserError(problem)
    model = None
    if made.trainer is not None:
        parts = made.parts
        model = LanguageModel(
            parts["model"],
            make_optimizer,
            parts["loss"],
            parts["compute"],
            base if run.initial is None else run.initial.checkpoint,
            made.architecture,
            parts.get("lora"),
            use_ema=run.uses_average,
            objective=parts.get("objective"),
        )
    return Built(run, made, missing, model)

"""From a parsed recipe to a model, data and a Trainer. Decides what the run is, builds what is cheap, checks everything, and
only then builds the model and returns.

Every command that takes a recipe calls `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer

from lit_llm.config import checks
from lit_llm.config.host_memory import memory_problem
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
        """Every setting. The run folder and what follows from resuming are filled in."""
        return self.run.config

    @property
    def parts(self) -> dict[str, Any]:
        return self.objects.parts

    @property
    def datamodule(self) -> Any:
        return self.objects.data

    @property
    def trainer(self) -> Trainer:
        """Not for `prepare`."""
        assert self.objects.trainer is not None
        return self.objects.trainer

    @property
    def model(self) -> LanguageModel:
        """Not for `prepare`."""
        assert self._model is not None
        return self._model


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
    if run.fits and machine is None:
        # `check` reduces the batch.
        assert made.trainer is not None
        if problem := memory_problem(made, run.config.trainer.precision, cut=run.scratch):
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

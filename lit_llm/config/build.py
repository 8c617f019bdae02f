"""Build a run's model, data and Trainer from its settings: `build` resolves settings such as auto, builds all objects that need
little time, checks the run, and then builds the model.

Every command that takes a recipe calls `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lit_llm.config import checks
from lit_llm.config.objects import RunObjects, make_objects, optimizer_of
from lit_llm.config.optimizer_trial import optimizer_problems
from lit_llm.config.run_spec import RunSpec
from lit_llm.core.errors import UserError
from lit_llm.ingest.paths import MissingFiles
from lit_llm.training.language_model import LanguageModel

ONE_DEVICE: Mapping[str, Any] = {"devices": 1, "num_nodes": 1, "strategy": "auto", "logger": False}
"""Trainer settings of a trial run, whose results are discarded."""
MemoryProblem = Callable[[RunObjects], str | None]


def build(
    spec: RunSpec,
    *,
    trainer: Mapping[str, Any] | None = None,
    memory: MemoryProblem | None = None,
) -> RunObjects:
    """Return all objects that a recipe describes. Nothing is written, and no training data are read.

    Args:
        spec: the run, with everything decided (`resolve.decide`).
        trainer: {argument of Trainer: value used instead of the recipe's}.
        memory: function that returns why a `fit` run does not fit into memory, or None (`lit_llm.plan.host_memory`).

    Raises:
        UserError: The recipe has problems; the text has one sentence a line for each.
    """
    objects, make_optimizer = make_objects(spec, trainer or {}), partial(optimizer_of, spec.config)
    problems = [*spec.problems, *objects.problems, *checks.model_problems(objects), *checks.training_problems(objects)]
    if spec.fits and objects.optimizer is not None and "trainer" not in spec.refused:
        problems += optimizer_problems(objects.strategy, make_optimizer, spec.config.optimizer.class_path)
    of_data = checks.data_problems(objects)
    missing = [problem for problem in of_data if spec.machine is not None and isinstance(problem, MissingFiles)]
    problems += [problem for problem in of_data if problem not in missing]
    changes = checks.checkpoint_problems(objects)
    base, of_base = (None, []) if changes else checks.base_of_adapters(objects)
    problems += [*changes, *of_base, *([] if changes else checks.evaluation_problems(objects))]
    problems += checks.initial_problems(objects)
    notes = [*spec.notes, *([] if problems or missing else checks.batch_notes(objects))]
    replace(spec, problems=tuple(problems), notes=tuple(notes)).raise_problems()
    if memory is not None and spec.fits and (problem := memory(objects)):
        raise UserError(problem)
    if spec.command == "prepare":
        return objects
    assert spec.model is not None and spec.loss is not None and spec.compute is not None
    model = LanguageModel(
        spec.model,
        make_optimizer,
        spec.loss,
        spec.compute,
        base if spec.initial is None else spec.initial.checkpoint,
        objects.architecture,
        spec.lora,
        use_ema=spec.uses_average,
        objective=objects.parts.get("objective"),
    )
    return replace(objects, missing_data=tuple(missing), model=model)

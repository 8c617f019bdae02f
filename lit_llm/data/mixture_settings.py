"""The settings of a mixture, and the checks of these settings that read no file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lit_llm.core.errors import UserError
from lit_llm.data.mixture_order import smallest_quotas
from lit_llm.data.shard_splits import ShardSource, path_problems

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def with_names(of_sources: Mapping[str, T]) -> dict[str, T]:
    """A copy of a dict by source, with each source's name as a string: YAML reads a name such as 2024 as a number."""
    return {str(name): value for name, value in of_sources.items()}


@dataclass
class MixtureSource(ShardSource):
    """The settings of one source of a mixture: its shards. Not every source needs validation text.

    Args:
        max_epochs: the most passes over the source. A run with more passes over the source is refused. None: no limit.
    """

    max_epochs: float | None = None


@dataclass
class MixturePhase:
    """The settings of a part of the run during which the weights of a mixture's sources stay the same.

    Args:
        weights: source → its share of the samples. The shares sum to 100 or to 1. A source that is not named has the share 0.
        until: where the phase ends, as a fraction of the run's samples. The last phase ends at 1.
    """

    weights: dict[str, float] = field(default_factory=dict)
    until: float = 1.0

    def __post_init__(self) -> None:
        self.weights = with_names(self.weights)


def mixture_problems(sources: Mapping[str, MixtureSource], phases: Sequence[MixturePhase]) -> list[str]:
    """One sentence for each setting of a mixture that is wrong by itself. No shard is read."""
    problems = []
    if not sources:
        problems.append("A mixture needs sources: give --data.sources '{NAME: {path: FOLDER}, …}'.")
    for name, source in sources.items():
        problems += _source_problems(name, source)
    if not phases:
        problems.append("A mixture needs weights: give --data.phases '[{weights: {NAME: 100}}]'.")
    problems += _until_problems([phase.until for phase in phases])
    for number, phase in enumerate(phases, 1):
        problems += [
            f"Phase {number} has a weight for {name}, which is not a source: the sources are {', '.join(sources)} "
            "(--data.phases)."
            for name in phase.weights
            if name not in sources
        ]
        try:
            smallest_quotas(phase.weights)
        except UserError as error:
            problems.append(f"Phase {number}: {error} (--data.phases).")
    unknown = any(phase.weights.keys() - sources.keys() for phase in phases)  # perhaps mistyped names of sources
    for name in sources:
        if phases and not unknown and not any(name in phase.weights for phase in phases):
            problems.append(
                f"Source {name} has no weight in any phase: give it one, or 0 to use its validation text only (--data.phases)."
            )
    return problems


def _source_problems(name: str, source: MixtureSource) -> list[str]:
    flag = f"--data.sources.{name}"
    if not _NAME.fullmatch(name):
        return [f"{name!r} cannot be the name of a source: use letters, digits, - and _ (--data.sources)."]
    problems = []
    if all(given is None for given in (source.path, source.train, source.val, source.test)):
        problems.append(f"Source {name} has no shards: give {flag}.path, a folder that prepare wrote.")
    problems += path_problems(source, flag)
    if source.max_epochs is not None and not (math.isfinite(source.max_epochs) and source.max_epochs > 0):
        problems.append(f"max_epochs of {name} is {source.max_epochs}, but must be above 0, or null ({flag}.max_epochs).")
    return problems


def _until_problems(untils: Sequence[float]) -> list[str]:
    before = 0.0
    for number, until in enumerate(untils, 1):
        if not (math.isfinite(until) and 0 < until <= 1):
            return [
                f"Phase {number} ends at {until}, but until is a fraction of the run, above 0 and at most 1 (--data.phases)."
            ]
        if until <= before:
            return [f"Phase {number} ends at {until}, but the one before ends at {before}: put them in order (--data.phases)."]
        before = until
    if untils and untils[-1] != 1:
        return [f"The last phase ends at {untils[-1]}, but the run goes on: set its until to 1 (--data.phases)."]
    return []

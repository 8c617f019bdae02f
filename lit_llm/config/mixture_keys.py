"""The nested settings of `data: Mixture`: what the parser cannot explain about them, and cannot set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lit_llm.config.arguments import COMMAND_LINE, FLAGS, Arguments, Assignment, Flag, leaves
from lit_llm.config.spelling import short
from lit_llm.core.yaml_reading import NotYaml, read_yaml

_MIXTURE = ("Mixture", "lit_llm.data.Mixture", "lit_llm.data.mixture.Mixture")
_PHASES = "'[{until: 0.9, weights: {web: 80, code: 20}}, {until: 1, weights: {web: 40, code: 60}}]'"


def refuse_wrong_shapes(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """The arguments without a mixture whose sources or phases are no dicts, and one sentence for each of these values."""
    if arguments.value_of("data") not in _MIXTURE:
        return arguments, []
    given = [a for a in arguments.assignments if a.key.startswith(("data.sources", "data.phases"))]
    # A flag that is a dict counts as several assignments. One of a key below a list is right: it changes the last element.
    given += [
        Assignment(f.key, f.value, COMMAND_LINE) for f in arguments.items if isinstance(f, Flag) and f.key == "data.phases"
    ]
    problems = list(dict.fromkeys(f"{problem} {a.where}" for a in given if (problem := _problem(a)) is not None))
    if not problems:
        return arguments, []
    return arguments.without([a for a in arguments.assignments if f"{a.key}.".startswith("data.")]), problems


def with_empty_sources(words: list[str]) -> list[str]:
    """The words with an empty `data.sources` before its first key: jsonargparse sets keys only in a dict that exists."""
    first = next((i for i, word in enumerate(words) if word.startswith("--data.sources.")), None)
    if first is None:
        return words
    for word in words[:first]:
        flag, _, value = word.partition("=")
        content = read_yaml(value) if flag == "--config" else None
        keys = [flag[2:]] if content is None else [key for key, _ in leaves(content)]
        if any(f"{key}.".startswith("data.sources.") for key in keys):
            return words
    return [*words[:first], "--data.sources={}", *words[first:]]


def _problem(assignment: Assignment) -> str | None:
    key, value = assignment.key, assignment.value
    if key == "data.sources" and value not in ({}, "{}"):
        return f"data.sources is {short(value)}, but must be a dict of sources, such as '{{web: {{path: FOLDER}}}}'"
    if key.startswith("data.sources.") and key.count(".") == 2 and value not in ({}, "{}"):
        return f"{key} is {short(value)}, but must be a dict of settings, such as '{{path: FOLDER}}'"
    if key.startswith("data.phases.") and assignment.source != FLAGS:
        return f"data.phases is a dict, but must be a list of phases, such as {_PHASES}"
    return next(_wrong_phases(value), None) if key == "data.phases" else None


def _wrong_phases(given: Any) -> Iterator[str]:
    phases = given
    if isinstance(given, str):
        try:
            phases = read_yaml(given)
        except NotYaml:
            phases = None
    if not isinstance(phases, list):
        yield f"data.phases is {short(given)}, but must be a list of phases, such as {_PHASES}"
        return
    for number, phase in enumerate(phases, 1):
        if not isinstance(phase, dict):
            yield f"phase {number} of data.phases is {short(phase)}, but must be a dict such as {{weights: {{web: 100}}}}"
            continue
        for key in phase.keys() - {"until", "weights"}:
            yield f"phase {number} of data.phases has the unknown key {key}: it takes until and weights"
        if not _is_number(phase.get("until", 1)):
            yield f"until of phase {number} is {short(phase['until'])}, but must be a number"
        weights = phase.get("weights", {})
        if not isinstance(weights, dict):
            yield f"weights of phase {number} are {short(weights)}, but must be a dict such as {{web: 80, code: 20}}"
            continue
        for name, weight in weights.items():
            if not _is_number(weight):
                yield f"the weight of {name} in phase {number} is {short(weight)}, but must be a number"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

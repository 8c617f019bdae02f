"""From arguments to a RunSpec. No objects are built and no files written here, and only recipe files are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jsonargparse import Namespace

from lit_llm.config.arguments import FLAGS, Arguments, Assignment, Flag, leaves, needs_value, plain_key, read
from lit_llm.config.class_defaults import drop_arguments_of_other_classes, fill_adamw, restore_defaults
from lit_llm.config.groups import Command
from lit_llm.config.mixture_keys import with_empty_sources
from lit_llm.config.parse_errors import explain
from lit_llm.config.parser import class_path, make_parser
from lit_llm.config.ranges import null_problems, number_problems, restore_whole_numbers
from lit_llm.config.run_spec import RunSpec
from lit_llm.config.spelling import refuse_groups_without_keys
from lit_llm.config.warmup import settle_warmup, take_warmup
from lit_llm.core.errors import noting
from lit_llm.core.yaml_reading import refusal


def parse(command: Command, arguments: Arguments | list[str], defaults: dict[str, Any] | None = None) -> RunSpec:
    """Parse the arguments of a command. Mistakes in values are collected in `problems`.

    Args:
        defaults: default values by dotted key, instead of those in `groups`.

    Raises:
        UserError: A recipe file cannot be read, or the mistake cannot be assigned to one value.
    """
    if isinstance(arguments, list):
        arguments = read(arguments)
    if command in ("validate", "test"):  # they log nothing: the package of a logger need not be here
        of_loggers = [a for a in arguments.assignments if a.source != FLAGS and a.key.startswith("trainer.logger")]
        arguments = arguments.without(of_loggers)
    arguments, problems = refuse_groups_without_keys(arguments)
    parser = make_parser(command, defaults)
    arguments, dropped = drop_arguments_of_other_classes(arguments)
    arguments, warmup, of_warmup = take_warmup(arguments)
    optimizers = [a.value for a in arguments.assignments if a.key == "optimizer" and a.value not in ({}, "{}")]
    arguments, other_ends = _without_earlier_alternatives(arguments)
    arguments = _with_class_paths(arguments)
    problems += [*of_warmup, *arguments.problems, *map(needs_value, arguments.bare)]

    mistakes, config = explain(arguments, lambda some: parser.parse_args(with_empty_sources(some.words())))
    problems += mistakes
    config.pop("config", None)
    problems = problems or _ambiguous_flags(arguments, config)
    given = {assignment.key for assignment in arguments.assignments}
    restore_whole_numbers(config, arguments)
    restore_defaults(config, parser.get_defaults(), given)
    notes = [*dropped, *other_ends]
    if command == "fit" and not (problems or null_problems(command, config) or number_problems(config, given)):
        notes += fill_adamw(config, given) if optimizers[-1:] == ["AdamW"] else []
        with noting(problems):
            notes += settle_warmup(warmup, config) if warmup is not None else []
    return RunSpec(command, arguments, parser, config, frozenset(given), tuple(problems), tuple(notes), warmup)


_ALTERNATIVES = (
    (("trainer.max_steps",), ("trainer.max_epochs",)),  # if one source sets both, a run ends at the first
    (("data.paths",), ("data.train", "data.val")),
)
"""Pairs of alternatives. If a source sets keys of one alternative, earlier sources' values for the other no longer count."""


def _without_earlier_alternatives(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """(the arguments without values that no longer count by the rule of `_ALTERNATIVES`, a sentence for each such value).

    So `--trainer.max_epochs` counts, and not a recipe's `max_steps`.
    """
    dropped, notes = list[Assignment](), list[str]()
    for sides in _ALTERNATIVES:
        given = [a for a in arguments.assignments if a.key in sum(sides, ()) and a.value not in (None, -1, "null", "-1")]
        chosen = next((side for side in sides if given and given[-1].key in side), ())
        others = [a for a in given if a.key not in chosen]
        if any(a.source == given[-1].source for a in others):  # a source that sets both means both
            continue
        dropped += others
        by = given[-1:] and f"{given[-1].key} {given[-1].value} {given[-1].where}"
        notes += [f"{a.key} {a.value} of {a.origin} is replaced by {by}" for a in others]
    return (arguments.without(dropped) if dropped else arguments), notes


def _with_class_paths(arguments: Arguments) -> Arguments:
    """The arguments, with short names that several classes have replaced by the path of the class that is meant."""

    def chosen(group: str, value: Any) -> Any:
        if isinstance(value, dict) and "class_path" in value:
            return {**value, "class_path": class_path(group, value["class_path"])}
        return class_path(group, value)

    return replace(
        arguments,
        items=[
            replace(item, value=class_path(plain_key(item.key), item.value))
            if isinstance(item, Flag)
            else replace(item, content={group: chosen(group, value) for group, value in item.content.items()})
            for item in arguments.items
        ],
    )


def _ambiguous_flags(arguments: Arguments, config: Namespace) -> list[str]:
    """A sentence for each flag whose text became a number or bool, although the same text in a recipe file is refused."""
    values = dict(leaves(config.as_dict()))
    return [
        f"{a.key} is {a.value[:20]}, which {why} (--{a.key})"
        for a in arguments.assignments
        if a.source == FLAGS
        and isinstance(a.value, str)
        and isinstance(values.get(a.key), (bool, int, float))
        and (why := refusal(a.value.strip()))
    ]

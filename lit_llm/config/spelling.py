"""Mistyped keys, found in a fraction of a second: before torch and Lightning are imported.

Only keys that certainly do not exist are reported here. Everything else is left to the recipe parser.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from lit_llm.config.arguments import COMMAND_LINE, Arguments, Assignment, needs_value, plain_key
from lit_llm.config.groups import ARCHITECTURE, CLASSES, GROUPS, OFF, PLAIN, Command, options_of
from lit_llm.config.recipe_files import SHIPPED
from lit_llm.config.source_keys import arguments_of
from lit_llm.core.errors import UserError, report


def check(command: Command, arguments: Arguments) -> Arguments:
    """Print mistyped keys now, and return the arguments without them, so that the other mistakes can be found too.

    Raises:
        UserError: There are mistakes, and the rest comes from shipped recipes, which have none.
    """
    arguments, problems = refuse_groups_without_keys(arguments)
    known = known_keys(command, arguments)
    unknown = [a for a in arguments.assignments if is_unknown(a, known)]
    problems += [*arguments.problems, *(unknown_key(a, _flat(known)) for a in unknown)]
    for key in arguments.bare:
        flag = Assignment(plain_key(key), None, COMMAND_LINE)
        problems.append(unknown_key(flag, _flat(known)) if is_unknown(flag, known) else needs_value(key))
    if not problems:
        return arguments
    rest = arguments.without(unknown)
    others = {Path(a.origin).resolve() for a in rest.assignments}
    if all(origin.is_relative_to(SHIPPED.resolve()) for origin in others):
        raise UserError("\n".join(problems))
    report("\n".join(problems))
    return Arguments(rest.items, rest.config_files, reported=True)


def refuse_groups_without_keys(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """The arguments without values like `model: 3` and `init_args: 3`, and one sentence for each."""
    wrong = [
        a
        for a in arguments.assignments
        if _needs_keys(a.key) and a.value not in (None, {}, "{}") and not (a.key in OFF and a.value == "null")
    ]
    problems = [f"{a.key} is {short(a.value)}, but must be a dict of settings, such as {{key: value}} {a.where}" for a in wrong]
    return (arguments.without(wrong) if wrong else arguments), problems


def _needs_keys(key: str) -> bool:
    return key in PLAIN or key.rpartition(".")[2] == "init_args"


def short(value: object) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-1]}"


def known_keys(command: Command, arguments: Arguments) -> dict[str, set[str] | None]:
    """Top-level keys with the names of their arguments: None where any can be valid, empty where there are none."""
    known: dict[str, set[str] | None] = {option.name: set() for option in options_of(command)}
    known |= {group: arguments_of(class_path) for group, class_path in PLAIN.items()}
    known[ARCHITECTURE] = None
    for group, settings in CLASSES.items():
        # A class that is named in one file can be replaced by a later one: the arguments of all of them are accepted.
        named = [str(a.value) for a in arguments.assignments if a.key == group and a.value not in (None, "null")]
        paths = [*named, settings.default or settings.base]
        names = [arguments_of(path if "." in path else f"{settings.package}.{path}") for path in paths]
        known[group] = None if None in names else set().union(*(each for each in names if each is not None))
    return known


def is_unknown(assignment: Assignment, known: dict[str, set[str] | None]) -> bool:
    """Whether a key certainly does not exist."""
    group, _, rest = assignment.key.partition(".")
    if group not in known:
        return True
    names = known[group]
    if names is None or not rest or group not in GROUPS:
        return bool(rest) and group not in GROUPS
    return rest.partition(".")[0].removesuffix("+") not in {*names, "dict_kwargs"}


def _flat(known: dict[str, set[str] | None]) -> list[str]:
    return [key for group, names in known.items() for key in (group, *(f"{group}.{name}" for name in sorted(names or ())))]


def unknown_key(assignment: Assignment, known: Iterable[str]) -> str:
    """One sentence about a key that does not exist, with the most similar one that does."""
    key, known = assignment.key, list(known)
    name = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    exact = [k for k in known if k.rpartition(".")[2] == name]  # the right name in another group
    longer = [k for k in known if f"_{name}_" in f"_{k.rpartition('.')[2]}_"]  # `batch_size` for `global_batch_size`
    near = near or (longer if len(longer) <= 3 else exact[:1]) or difflib.get_close_matches(key, known, n=1, cutoff=0.65)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"unknown key {key}{hint} {assignment.where}"

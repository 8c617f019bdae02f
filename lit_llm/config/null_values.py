"""Keys that are null although they need a value. A recipe file can say so; jsonargparse then does not check the type."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any

from jsonargparse import Namespace

from lit_llm.config.arguments import leaves
from lit_llm.config.class_defaults import all_arguments
from lit_llm.config.groups import OFF, PLAIN, options_of
from lit_llm.config.parse import Recipe
from lit_llm.config.parser import class_at, find_class

_NEEDED = (*(group for group in PLAIN if group not in OFF), "optimizer", "data")
"""Groups that a run cannot do without."""


def null_problems(recipe: Recipe) -> list[str]:
    """A sentence for each key that is null and must not be."""
    config = recipe.config
    keys = [option.name for option in options_of(recipe.command) if config[option.name] is None and not _optional(option.type)]
    keys += [group for group in _NEEDED if config.get(group) is None]
    for group, value in vars(config).items():
        if group in PLAIN and value is not None:
            keys += _nulls_of(group, vars(value), class_at(PLAIN[group]))
        elif isinstance(value, Namespace):
            keys += _nulls(group, value)
    keys += _replaced_by_defaults(recipe)
    return [f"{key} is null, but needs a value (--{key})" for key in dict.fromkeys(keys)]


def _replaced_by_defaults(recipe: Recipe) -> Iterator[str]:
    """Arguments that are null, for which the parser has taken the default of a class that a later source names."""
    given = recipe.arguments.assignments
    now = dict(leaves(recipe.config.as_dict()))
    for key in dict.fromkeys(each.key for each in given if each.value is None and "." in each.key):
        is_last = recipe.arguments.value_of(key) is None and not any(each.key.startswith(f"{key}.") for each in given)
        if is_last and now.get(key) is not None:
            yield key


def _nulls(key: str, value: Any) -> Iterator[str]:
    """The keys that are null at and below a value which may name a class."""
    if isinstance(value, list):
        for each in value:
            yield from _nulls(key, each)
    elif isinstance(value, Namespace) and isinstance(value.get("class_path"), str):
        arguments = value.get("init_args") or Namespace()
        yield from _nulls_of(key, vars(arguments), find_class(key, value.class_path))


def _nulls_of(key: str, values: dict[str, Any], cls: type | None) -> Iterator[str]:
    for name, value in values.items():
        if value is not None:
            yield from _nulls(f"{key}.{name}", value)
        elif cls is not None and not _accepts_null(cls, name):
            yield f"{key}.{name}"


def _accepts_null(cls: type, argument: str) -> bool:
    """Whether an argument's type, its default, or the lack of both, allows null."""
    declared = next((each for each in inspect.getmro(cls) if argument in _own_hints(each)), None)
    parameter = all_arguments(cls).get(argument)
    if parameter is not None and parameter.default is None:
        return True
    return declared is None or _optional(_own_hints(declared)[argument])


@functools.cache
def _own_hints(cls: type) -> dict[str, Any]:
    """The types of a class's own arguments, as far as their names can be found."""
    init = vars(cls).get("__init__")
    try:
        return typing.get_type_hints(init) if inspect.isfunction(init) else {}
    except NameError:  # a type that is imported for type checkers only
        return {}


def _optional(hint: Any) -> bool:
    if hint in (Any, None, NoneType, object):
        return True
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return any(_optional(each) for each in typing.get_args(hint))
    return typing.get_origin(hint) is typing.Literal and None in typing.get_args(hint)

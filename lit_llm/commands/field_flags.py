"""Flags and a YAML file for the fields of a dataclass. No torch.

A field has the metadata `help` and `flag`, its name as a flag and in YAML if that is not the field's. Dots in it are levels of
the YAML file. Types: bool, int, float, str, each perhaps with None, and tuple[str, ...]. A flag overrides the file.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lit_llm.commands.own_flags import OwnFlags, number, whole_number
from lit_llm.config.arguments import leaves
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import InvalidYaml, read_yaml_file

Settings = TypeVar("Settings")

_TYPES: dict[type, tuple[Callable[[str], Any], str, str]] = {
    bool: (bool, "true|false", "true or false"),
    int: (whole_number, "N", "a whole number"),
    float: (number, "X", "a number"),
    str: (str, "TEXT", "text"),
}
"""How the value of a flag is read, how help shows it, and how a message calls it."""


def name_of(one: Field[Any]) -> str:
    """The name of a field as a flag (without dashes) and in YAML."""
    return one.metadata["flag"] or one.name


def add_field_flags(flags: OwnFlags, cls: type) -> None:
    """Add ``--config`` and a flag for each field of ``cls``."""
    flags.add_argument("--config", type=Path, default=argparse.SUPPRESS, help="YAML file of settings; flags override it")
    hints = get_type_hints(cls)
    for one in fields(cls):
        kind, optional, many = _kind(hints[one.name])
        read, metavar, _ = _TYPES[kind]
        default = "" if many or one.default in (None, MISSING) else f" (default: {str(one.default).lower()})"
        flags.add_argument(
            f"--{name_of(one)}",
            dest=one.name,
            nargs="+" if many else None,
            type=_or_null(read) if optional else read,
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=one.metadata["help"] + default,
        )


def settings_from(cls: type[Settings], values: argparse.Namespace) -> Settings:
    """The settings of the flags that were given, and of the file that they name.

    Raises:
        UserError: The file cannot be read, has another key, or a value of another type.
    """
    given = {} if "config" not in values else _of_file(cls, values.config)
    names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
    given |= {name: tuple(value) if isinstance(value, list) else value for name, value in vars(values).items() if name in names}
    return cls(**given)


def _of_file(cls: type, path: Path) -> dict[str, Any]:
    """The fields that a file sets."""
    try:
        tree = read_yaml_file(path)
    except InvalidYaml as error:
        raise UserError(f"{path} {error} (--config)") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror} (--config)") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold keys and values, such as normalise: true (--config)")
    by_name = {name_of(one): one for one in fields(cls)}
    hints, given, problems = get_type_hints(cls), {}, []
    for key, value in leaves(tree):
        if key not in by_name:
            near = difflib.get_close_matches(key, list(by_name), n=1)
            problems.append(f"{path} has the unknown key {key}{f'; did you mean {near[0]}?' if near else ''} (--config)")
            continue
        kind, optional, many = _kind(hints[by_name[key].name])
        if many:
            value = (value,) if isinstance(value, kind) else tuple(value) if isinstance(value, list) else value
        if kind is float and type(value) is int:
            value = float(value)
        right = all(type(one) is kind for one in value) if many and isinstance(value, tuple) else type(value) is kind
        if right or (optional and value is None):
            given[by_name[key].name] = value
        else:
            what = f"{'a list of ' * many}{_TYPES[kind][2]}{' or null' * optional}"
            problems.append(f"{key} is {value!r} in {path}, but must be {what} (--{key})")
    if problems:
        raise UserError("\n".join(problems))
    return given


def _kind(hint: Any) -> tuple[type, bool, bool]:
    """The type of a value, whether it may be None, and whether there may be several."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], False, True
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return (kinds[0], True, False) if kinds else (hint, False, False)


def _or_null(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "null" else read(text)

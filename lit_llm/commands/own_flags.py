"""Flags that belong to one command, beside those of a recipe or instead of them. No torch."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from lit_llm.config.arguments import is_flag, leaves, needs_value, underscored
from lit_llm.core.errors import UserError, refuse
from lit_llm.core.number_domain import Domain
from lit_llm.core.yaml_reading import InvalidYaml, read_yaml_file

Settings = TypeVar("Settings")


class OwnFlags(argparse.ArgumentParser):
    """Flags of a command. Mistakes raise UserError, one sentence each.

    Args:
        command: its name.
        alone: the command takes no recipe, so that `parse` refuses other words, and `--help` prints these flags.
    """

    def __init__(self, command: str = "", *, alone: bool = False, **options: Any) -> None:
        shown = argparse.ArgumentDefaultsHelpFormatter if alone else argparse.RawDescriptionHelpFormatter
        self._flags: dict[str, argparse.Action] = {}
        self._ranges: dict[str, Domain] = {}
        self.problems: list[str] = []
        """After `split`: numbers outside their ranges, one sentence each."""
        options.setdefault("prog", f"python -m lit_llm {command}")
        super().__init__(allow_abbrev=False, add_help=alone, formatter_class=shown, **options)
        self.register("type", int, whole_number)
        self.register("type", float, number)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse. With `type=bool` it is a switch: `--x` and `--x true` are the same.

        Args:
            options: `range` is the range of a number that is given, and tells its type.
        """
        domain: Domain | None = options.pop("range", None)
        if domain is not None:
            options["type"] = int if domain.whole else float
        if options.get("type") is bool:
            options = {"default": False, **options, "type": true_or_false, "nargs": "?", "const": True, "metavar": "true|false"}
        action = super().add_argument(*names, **options)
        self._flags |= dict.fromkeys(action.option_strings, action)
        if domain is not None:
            self._ranges[action.dest] = domain
        return action

    def described(self) -> dict[str, tuple[str, str]]:
        """Name → default and help."""
        return {name.lstrip("-"): (str(each.default).lower(), each.help or "") for name, each in self._flags.items()}

    def split(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """The values of these flags, with the whole ``command`` as it was typed, and the other words.

        Raises:
            UserError: A value is missing or of the wrong type.
        """
        own: list[str] = []
        others: list[str] = []
        command = shlex.join([*self.prog.split(), *words])
        words = underscored(words)
        while words:
            word = words.pop(0)
            action = self._flags.get(word.partition("=")[0])
            if action is None:
                others.append(word)
                continue
            if action.nargs in ("+", 0) or "=" in word:  # a list of values, --help, or a value in the same word
                own.append(word)
                while action.nargs == "+" and words and not is_flag(words[0]):
                    own.append(words.pop(0))
            elif words and not is_flag(words[0]):
                own.append(f"{word}={words.pop(0)}")  # argparse takes -1e-3 after a space for a flag
            elif action.nargs == "?":
                own.append(word)
            else:
                raise UserError(needs_value(word.lstrip("-")))
        values = self.parse_args(own, argparse.Namespace(command=command))
        given = {name: getattr(values, name) for name in self._ranges if getattr(values, name) is not None}
        self.problems = [problem for name, value in given.items() if (problem := self._ranges[name].problem(name, value))]
        return values, others

    def parse(self, words: list[str]) -> argparse.Namespace:
        """The values of these flags, which are all that the command takes.

        Raises:
            UserError: A value is missing or wrong, or a word is not one of these flags.
        """
        self.refuse_unknown([word for word in underscored(words) if is_flag(word)])
        values, others = self.split(words)
        refuse(self.problems)
        self.refuse_unknown(others)
        return values

    def refuse_unknown(self, words: list[str]) -> None:
        """Raises:
        UserError: Some words are not flags of this command. Names the most similar ones.
        """
        known = {flag.lstrip("-"): flag for flag in sorted(self._flags)}
        problems = []
        for word in words:
            flag = word.partition("=")[0]
            if not is_flag(word):
                problems.append(f"unexpected argument '{word}' ({self.prog} --help)")
            elif flag not in self._flags:
                near = difflib.get_close_matches(flag.lstrip("-"), known, n=1, cutoff=0.7)
                hint = f"; did you mean {known[near[0]]}?" if near else ""
                problems.append(f"unknown flag {flag}{hint} ({self.prog} --help)")
        refuse(problems)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--\w+): (?=is |needs )", r"\1 ", message)  # as the functions below write
        raise UserError(f"{message.removeprefix('argument ')} ({self.prog} --help)")


def _reader(kind: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"needs {name}, not {text!r}") from None

    return read


whole_number, number = _reader(int, "a whole number"), _reader(float, "a number")


def true_or_false(text: str) -> bool:
    """Value of a flag."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"is {text!r}, it must be true or false")
    return text == "true"


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
    """Add ``--config``, a YAML file, and a flag for each field of the dataclass ``cls``. A flag overrides the file.

    A field has the metadata `help` and `flag`, its name as a flag and in YAML if that is not the field's. Dots in it are levels
    of the YAML file. Types: bool, int, float, str, each perhaps with None, and tuple[str, ...].
    """
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
    refuse(problems)
    return given


def _kind(hint: Any) -> tuple[type, bool, bool]:
    """The type of a value, whether it may be None, and whether there may be several."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], False, True
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return (kinds[0], True, False) if kinds else (hint, False, False)


def _or_null(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "null" else read(text)

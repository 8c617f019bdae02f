"""Parses the flags that one command has, beside the flags of a recipe or instead of them. This module imports no torch."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from lit_llm.config.arguments import is_flag, leaves, needs_value, underscored
from lit_llm.core.errors import UserError, refuse
from lit_llm.core.number_domain import Domain
from lit_llm.core.yaml_reading import InvalidYaml, as_flag, read_yaml_file

Settings = TypeVar("Settings")


class OwnFlags(argparse.ArgumentParser):
    """Parser of one command's own flags. Mistakes of the user raise UserError, one sentence each.

    Args:
        command: the command's name.
        alone: whether the command takes no recipe. `--help` then prints these flags only.
        options: arguments of argparse.ArgumentParser.
    """

    def __init__(self, command: str = "", *, alone: bool = False, **options: Any) -> None:
        shown = argparse.ArgumentDefaultsHelpFormatter if alone else argparse.RawDescriptionHelpFormatter
        self._flags: dict[str, argparse.Action] = {}
        self._ranges: dict[str, Domain] = {}
        self.problems: list[str] = []
        """One sentence for each given number outside the range of its flag. `split` sets this list."""
        options.setdefault("prog", f"python -m lit_llm {command}")
        super().__init__(allow_abbrev=False, add_help=alone, formatter_class=shown, **options)
        self.register("type", int, whole_number)
        self.register("type", float, number)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add a flag as argparse does. With `type=bool` it is a switch: `--x` and `--x true` are the same.

        Args:
            options: arguments of argparse, and `range`: a Domain of numbers, which also decides the type, int or float.
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
        """Return {name of a flag: (default as text, help)}."""
        return {name.lstrip("-"): (str(each.default).lower(), each.help or "") for name, each in self._flags.items()}

    def split(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return (values of these flags, and under ``command`` the whole command line; words that are not these flags).

        Values outside a `range` become sentences in `self.problems`.

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
        """Return the values of these flags, for a command that takes no other words.

        Raises:
            UserError: A value is missing or wrong, or a word is none of these flags.
        """
        self.refuse_unknown([word for word in underscored(words) if is_flag(word)])
        values, others = self.split(words)
        refuse(self.problems)
        self.refuse_unknown(others)
        return values

    def refuse_unknown(self, words: list[str]) -> None:
        """Refuse words that are not flags of this command.

        Raises:
            UserError: Some of `words` are no such flags. The message names similar flags.
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
    """Return the bool that a flag's text, "true" or "false", means. Any other text raises an ArgumentTypeError."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"is {text!r}, it must be true or false")
    return text == "true"


_TYPES: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (bool, "true|false"),
    int: (whole_number, "N"),
    float: (number, "X"),
    str: (str, "TEXT"),
}
"""Type of a flag → (function that reads a value, how the help shows a value)."""


def add_field_flags(flags: OwnFlags, cls: type) -> None:
    """Add ``--config``, a YAML file of settings, and a flag for each field of the dataclass ``cls``. Flags override the file.

    Metadata of a field: `help`, and `flag`, the name of its flag and YAML key, or None for the field's name. A dot in a name is
    a level of the YAML file. Types of fields: bool, int, float, str, each perhaps with None, and tuple[str, ...].
    """
    flags.add_argument("--config", type=Path, default=argparse.SUPPRESS, help="YAML file of settings; flags override it")
    hints = get_type_hints(cls)
    for one in fields(cls):
        kind, optional, many = _kind(hints[one.name])
        read, metavar = _TYPES[kind]
        default = "" if many or one.default in (None, MISSING) else f" (default: {str(one.default).lower()})"
        flags.add_argument(
            f"--{one.metadata['flag'] or one.name}",
            dest=one.name,
            nargs="+" if many else None,
            type=_or_null(read) if optional else read,
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=one.metadata["help"] + default,
        )


def parse_settings(flags: OwnFlags, cls: type[Settings], words: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Return (values of all flags; an object of the dataclass `cls` from the file of --config, overridden by flags).

    Raises:
        UserError: A word is wrong, or the file cannot be read, has an unknown key, or a value of a wrong type.
    """
    own = flags.parse(words)
    if "config" in own:
        try:
            own = flags.parse([*_words_of(own.config), *words])
        except UserError as error:
            raise UserError("\n".join(f"{own.config}: {line} (--config)" for line in str(error).splitlines())) from None
    given = {one.name: getattr(own, one.name) for one in fields(cls) if one.name in own}  # type: ignore[arg-type]
    return own, cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _words_of(path: Path) -> list[str]:
    """Return the settings in a YAML file as words of a command line: --key=value, or --key and values for a list."""
    try:
        tree = read_yaml_file(path)
    except (InvalidYaml, OSError) as error:
        raise UserError(getattr(error, "strerror", None) or str(error)) from None
    if not isinstance(tree, dict | None):
        raise UserError("it must hold keys and values, such as normalise: true")
    words = []
    for key, value in leaves(tree or {}):
        if value != []:
            words += [f"--{key}", *map(as_flag, value)] if isinstance(value, list) else [f"--{key}={as_flag(value)}"]
    return words


def _kind(hint: Any) -> tuple[type, bool, bool]:
    """Return (type of a field's values, whether a value may be None, whether the field is a tuple) from its annotation."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], False, True
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return (kinds[0], True, False) if kinds else (hint, False, False)


def _or_null(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "null" else read(text)

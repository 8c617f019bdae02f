"""Mistyped keys, found in a fraction of a second: before torch and Lightning are imported.

Only keys that certainly do not exist are reported here. Everything else is left to the recipe parser. The arguments of a class
are read from its source, because importing torch and Lightning takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from lit_llm.config.arguments import COMMAND_LINE, FLAGS, Arguments, Assignment, needs_value, plain_key
from lit_llm.config.groups import ARCHITECTURE, CLASSES, GROUPS, OFF, OPTIONS, PLAIN, WARMUPS, Command, options_of
from lit_llm.config.recipe_files import SHIPPED
from lit_llm.core.disk import real_path
from lit_llm.core.errors import UserError


def check(command: Command, arguments: Arguments, flags: Iterable[str] = (), own: Sequence[str] = ()) -> Arguments:
    """Return the arguments without wrong keys and words, and with a sentence about each of them in `problems`.

    Args:
        flags: names of the command's own flags, which are no keys of a recipe.
        own: problems with the values of the own flags.

    Raises:
        UserError: There are mistakes, and either `own` is not empty, or the remaining settings are all from shipped recipes,
            which have no mistakes. The answer then needs no import of torch.
    """
    arguments, problems = refuse_groups_without_keys(arguments)
    problems = [*own, *problems]
    known = known_keys(command, arguments)
    others = {a.key: said for a in arguments.assignments if (said := _of_other_commands(command, a))}
    unknown = [a for a in arguments.assignments if a.key in others or is_unknown(a, known)]
    problems += [*arguments.problems, *(others.get(a.key) or unknown_key(a, _flat(known), flags) for a in unknown)]
    for key in arguments.bare:
        flag = Assignment(plain_key(key), None, COMMAND_LINE)
        unknown_flag = key not in ("config", "c", "run") and is_unknown(flag, known)
        problems.append(unknown_key(flag, _flat(known), flags) if unknown_flag else needs_value(key))
    if not problems:
        return arguments
    rest = arguments.without(unknown)
    origins = {real_path(a.origin) for a in rest.assignments}
    if own or all(origin.is_relative_to(real_path(SHIPPED)) for origin in origins):
        raise UserError("\n".join(problems))
    return Arguments(rest.items, rest.config_files, problems)


def refuse_groups_without_keys(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """Return (`arguments` without values such as `model: 3` where a dict is needed, a sentence for each such value)."""
    wrong = [
        a
        for a in arguments.assignments
        if (a.key in PLAIN or a.key.rpartition(".")[2] == "init_args")
        and a.value not in (None, {}, "{}")
        and not (a.key in OFF and a.value == "null")
    ]
    problems = [f"{a.key} is {short(a.value)}, but must be a dict of settings, such as {{key: value}} {a.where}" for a in wrong]
    return (arguments.without(wrong) if wrong else arguments), problems


def short(value: object) -> str:
    """Return the text of a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-1]}"


def known_keys(command: Command, arguments: Arguments) -> dict[str, set[str] | None]:
    """Return {top-level key: names of its arguments; None if any name may be valid, empty if it has no arguments}."""
    known: dict[str, set[str] | None] = {option.name: set() for option in options_of(command)}
    known |= {group: arguments_of(class_path) for group, class_path in PLAIN.items()}
    known[ARCHITECTURE] = None
    for group, settings in CLASSES.items():
        # A class that is named in one file can be replaced by a later one: the arguments of all of them are accepted.
        named = [str(a.value) for a in arguments.assignments if a.key == group and a.value not in (None, "null")]
        paths = [*named, settings.default or settings.base]
        names = [arguments_of(path if "." in path else f"{settings.package}.{path}") for path in paths]
        known[group] = None if None in names else set().union(*(each for each in names if each is not None))
    if known["schedule"] is not None:
        known["schedule"] |= WARMUPS.keys()
    return known


def is_unknown(assignment: Assignment, known: dict[str, set[str] | None]) -> bool:
    """Whether the key of `assignment` certainly does not exist. `known`: the result of `known_keys`."""
    group, _, rest = assignment.key.partition(".")
    if group not in known:
        return True
    names = known[group]
    if names is None or not rest or group not in GROUPS:
        return bool(rest) and group not in GROUPS
    return rest.partition(".")[0].removesuffix("+") not in {*names, "dict_kwargs"}


def _of_other_commands(command: Command, given: Assignment) -> str | None:
    """Return why a flag is refused that `fit`, say, has and `command` does not use; None for other flags and for files."""
    option = next((each for each in OPTIONS if each.name == given.key and command not in each.commands), None)
    if option is None or given.source != FLAGS:
        return None
    instead = (
        {"resume": "ckpt_path"} if command in ("validate", "test") else {"ckpt_path": "resume"} if command == "fit" else {}
    )
    flag = instead.get(given.key)
    hint = f": name the checkpoint with --{flag}" if flag else ": leave it out"
    return f"{given.key} is a flag of {' and '.join(option.commands)}, not of {command}{hint} {given.where}"


def _flat(known: dict[str, set[str] | None]) -> list[str]:
    return [key for group, names in known.items() for key in (group, *(f"{group}.{name}" for name in sorted(names or ())))]


_SHARDS, _TEXTS = "--data TokenShards for token shards", "--data TextFiles for text files"
_READ_WITH = {"data.path": _SHARDS, "data.paths": _TEXTS} | dict.fromkeys(
    ("data.train", "data.val", "data.test"), f"{_SHARDS} or {_TEXTS}"
)
"""For keys that the default class of `data` lacks: the flag of a class that has the key."""


def unknown_key(assignment: Assignment, known: Iterable[str], flags: Iterable[str] = ()) -> str:
    """Return the message about the key of `assignment`, which does not exist, with similar keys in `known` or `flags`."""
    key, known = assignment.key, list(known)
    known += _settings_of_source(key, known)
    name = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    exact = [k for k in known if k.rpartition(".")[2] == name]  # the right name in another group
    longer = [k for k in known if f"_{name}_" in f"_{k.rpartition('.')[2]}_"]  # `batch_size` for `global_batch_size`
    near = near or (longer if len(longer) <= 4 else exact[:1]) or difflib.get_close_matches(key, list(flags), n=1, cutoff=0.85)
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.65)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    if key in _READ_WITH and not any(each.startswith("data.") for each in near):
        hint = f"; the data of this run have none: name other data, with {_READ_WITH[key]}"
    return f"unknown key {key}{hint} {assignment.where}"


def _settings_of_source(key: str, known: list[str]) -> list[str]:
    """Return keys for the mixture source in `key`, with the settings that other sources have, without those in `known`."""
    if not (key.startswith("data.sources.") and key.count(".") == 3):
        return []
    source = key.rpartition(".")[0]
    others = {each.rpartition(".")[2] for each in known if each.startswith("data.sources.") and each.count(".") == 3}
    return [f"{source}.{name}" for name in sorted(others) if f"{source}.{name}" not in known]


# -- arguments of a class, without importing it ------------------------------------------------------------------------


def arguments_of(class_path: str) -> set[str] | None:
    """Return the names of the arguments of a class of lit_llm or Lightning; None if its source does not show all of them.

    Follows re-exports, base classes and `**kwargs`. May contain arguments of base classes that the class does not accept.
    """
    module, _, name = class_path.rpartition(".")
    return _arguments(module, name)


@cache
def _arguments(module: str, name: str) -> set[str] | None:
    tree = _tree(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _arguments_of_class(module, node)
    origin = _imported_from(module, tree, name)
    return None if origin is None else _arguments(*origin)


def _arguments_of_class(module: str, node: ast.ClassDef) -> set[str] | None:
    names: set[str] = set()
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is not None:
        arguments = init.args
        names = {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]} - {"self"}
        if arguments.kwarg is None:
            return names
    elif any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        names = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    for base in node.bases:
        if not isinstance(base, ast.Name):
            return None
        if base.id in ("ABC", "object"):
            continue
        inherited = _arguments(module, base.id)
        if inherited is None:
            return None
        names |= inherited
    return names


def _imported_from(module: str, tree: ast.Module, name: str) -> tuple[str, str] | None:
    """The module that `name` is imported from, and its name there; None if `module` does not import it."""
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)):
        for alias in node.names:
            if (alias.asname or alias.name) in (name, "*"):
                file = _file(module)
                package = module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]
                origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                return origin, name if alias.name == "*" else alias.name
    return None


@cache
def _tree(module: str) -> ast.Module | None:
    file = _file(module)
    try:
        return None if file is None else ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _file(module: str) -> Path | None:
    """The source file of a module of lit_llm or Lightning, found without importing its package."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top) if top in ("lit_llm", "lightning") else None  # imports nothing: a top-level name
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*rest)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)

"""The texts of `--help`: all settings of a command with their defaults, or one group of settings with full explanations."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from docstring_parser import parse, parse_from_object

from lit_llm.config.arguments import plain_key
from lit_llm.config.class_defaults import all_arguments
from lit_llm.config.groups import (
    ARCHITECTURE,
    CLASSES,
    GROUPS,
    OFF,
    OPTIONS,
    PLAIN,
    TRAINER,
    Command,
    default_class,
    options_of,
)
from lit_llm.config.parser import class_at, known_classes
from lit_llm.config.ranges import range_of
from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import LARGEST

WIDTH = 128
_USAGE = {"prepare": "--data CLASS --data.paths FILES --out DIR [--config RECIPE ...] [--KEY VALUE ...]"}
"""{command: usage line}, for commands that need no recipe."""
_LISTED: dict[str, tuple[str, ...]] = {
    "fit": GROUPS,
    "prepare": ("data",),
    "validate": ("data", "tasks"),
    "test": ("data", "tasks"),
}
"""{command: groups of settings that its help lists}."""
_A_LINE_EACH = ("model", "loss", "compute", "optimizer", "data", "schedule")
"""Groups with a line for each key in a command's help. Of other groups, the help lists only keys and defaults, in one text."""
_SKIPPED = ("params", "self")  # the optimizer's parameters come from the model


Flags = Mapping[str, tuple[str, str]]
"""{name: (default, help)} of the flags of a command that are no keys of a recipe."""


class Key(NamedTuple):
    """Record of one setting (key of a recipe): its name, and its type, default and explanation as texts of the help."""

    name: str
    type: str
    default: str
    help: str


def print_help(command: Command, group: str | None, program: str, own: Flags) -> None:
    """Print the help of a command, or the full help of one group of settings.

    Args:
        group: a group, a group and a class, like `schedule.WSD`, or a key, like `model.moe`, `schedule.WSD.shape` or `resume`.
            None: the help of the command.
        program: how the command is called, for the usage line.
        own: flags of the command that are no keys of a recipe.

    Raises:
        UserError: There is no such group, class or key.
    """
    if group is None:
        lines = _overview(command, program, own)
    else:
        group = plain_key(group)
        options = {name: Key(name, "", default if default != "none" else "null", text) for name, (default, text) in own.items()}
        options |= {each.name: Key(each.name, _type(each.type), _value(each.default), each.help) for each in OPTIONS}
        lines = _of_key(options[group], "") if group in options else _in_full(group)
    print("\n".join(lines))


def _overview(command: Command, program: str, own: Flags) -> Iterator[str]:
    trains = command == "fit" and bool(own)  # check, find-lr: commands that train as `fit` does, with flags of their own
    yield f"usage: {program} {_USAGE.get(command, '--config RECIPE [--config OVERLAY ...] [--KEY VALUE ...]')}"
    yield "Set every key in a recipe (YAML) or by a flag; later ones win. Environment variables do not override settings."
    yield f"python -m lit_llm {command} --help GROUP explains one group in full, --help GROUP.CLASS one of its classes."
    yield f"python -m lit_llm {command} --config RECIPE --print_config prints every setting of a recipe."
    yield ""
    yield "  --config RECIPE    A recipe file or the name of a shipped recipe (python -m lit_llm recipes)."
    yield "  --run DIR          The recipe and the folder of a run."
    for name, (default, text) in own.items():
        yield _line(Key(name, "", default if default != "none" else "null", text), "")
    for option in [] if trains else options_of(command):
        if command in option.commands:
            yield _line(Key(option.name, _type(option.type), _value(option.default), option.help), "")
    listed = () if trains else _LISTED[command]
    for group in listed:
        if group in _A_LINE_EACH:
            yield ""
            yield from _summary(group)
    if brief := [group for group in listed if group not in _A_LINE_EACH]:
        yield ""
        yield "Further groups with their classes, keys and defaults; --help GROUP explains them:"
        for group in brief:
            yield from _brief(group)
    if listed != GROUPS:
        yield ""
        yield f"{'Flags' if trains else 'Further flags'} of a recipe: python -m lit_llm fit --help"


def _title(group: str) -> str:
    title = " ".join(_docstring(_default_class(group)).partition("\n\n")[0].split())
    off = group in OFF or (group in CLASSES and CLASSES[group].default is None)
    return _shorten(f"{group}{' (off by default)' if off else ''}: {title}")


def _brief(group: str) -> Iterator[str]:
    if group == ARCHITECTURE:
        yield "architecture: your own model by the path of its class, instead of lit_llm's GPT (docs/own-model.md)"
        return
    yield _title(group)
    cls = _default_class(group)
    keys = [(group, "null")] if group in OFF else []
    keys += [(f"{group}.{key.name}", key.default) for key in _keys(group, cls)]
    if group in CLASSES:
        ours = [name for name, each in known_classes(group).items() if each.__module__.startswith("lit_llm.")]
        keys.insert(0, (group, " | ".join(ours)))
    words = ", ".join(f"--{key} {default}".replace(" ", "\0") for key, default in keys)  # no line break within a flag
    lines = textwrap.wrap(words, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    yield from (line.replace("\0", " ") for line in lines)


def _summary(group: str) -> Iterator[str]:
    cls = _default_class(group)
    yield _title(group)
    if group in CLASSES:
        yield _shorten(f"  --{group} CLASS   {cls.__name__}. {_others(group, cls)}")
    for key in _keys(group, cls):
        yield _line(key, f"{group}.")
    own = {key.name for key in _keys(group, cls)}
    for name, each in known_classes(group).items() if group in CLASSES else []:
        more = [key.name for key in _keys(group, each) if key.name not in own]
        if more and each.__module__.startswith("lit_llm."):
            yield _shorten(f"  {name} also has --{group}.{f', --{group}.'.join(more)}")


def _in_full(name: str) -> Iterator[str]:
    group, _, inner = name.partition(".")
    if group == ARCHITECTURE:
        yield from _brief(group)
        return
    if group not in GROUPS:
        raise UserError(f"there is no group {group}; groups are {', '.join(g for g in GROUPS if g != ARCHITECTURE)} (--help)")
    cls, prefix = _default_class(group), group
    if inner:
        known = _nested(cls) or known_classes(group)
        if inner not in known:
            yield from _one_key(group, inner)
            return
        cls, prefix = known[inner], name if _nested(cls) else group
    yield f"{prefix}: {cls.__module__}.{cls.__name__}"
    yield ""
    yield from _docstring(cls).partition("\nArgs:\n")[0].strip().splitlines()
    yield ""
    for key in _keys(prefix, cls):
        yield from _of_key(key, f"{prefix}.")
    if nested := _nested(cls):
        yield f"Keys within a key: {', '.join(f'--help {group}.{name}' for name in nested)}."
    if group in CLASSES:
        yield ""
        yield from textwrap.wrap(f"Classes that --{group} can name: {', '.join(known_classes(group))}.", WIDTH)
        yield f"Their keys: --help {group}.CLASS. Your own class: its path, like my_project.MyClass."


def _of_key(key: Key, prefix: str) -> Iterator[str]:
    yield f"  --{prefix}{key.name} {key.type} (default: {key.default})".replace("  (", " (")
    yield from textwrap.wrap(key.help, WIDTH, initial_indent="      ", subsequent_indent="      ")


def _one_key(group: str, inner: str) -> Iterator[str]:
    """Yield the help of one key of a group, as explained by the group's default class or the first class that has the key.

    Args:
        inner: the key, perhaps after a class of the group or a key that has further keys: `WSD.shape`, `moe.experts`.

    Raises:
        UserError: There is no such key.
    """
    first, _, rest = inner.partition(".")
    nested, known = _nested(_default_class(group)), known_classes(group)
    inside = {"trainer.strategy": [class_at("lit_llm.distributed.mesh_strategy.MeshStrategy")]}.get(f"{group}.{first}")
    inside = inside or ([nested[first]] if first in nested else [*known_classes(f"{group}.{first}").values()])
    prefix, classes, name = group, [_default_class(group), *known.values()], inner
    if rest and inside:
        prefix, classes, name = f"{group}.{first}", inside, rest
    elif rest and first in known:
        classes, name = [known[first]], rest
    keys = {key.name: (cls, key) for cls in reversed(classes) for key in _keys(prefix, cls)}
    name = name.partition(".")[0]  # `trainer.val_check_interval.hours` is explained by its first part
    if name not in keys:
        near = difflib.get_close_matches(name, keys, n=1)
        hint = f"; did you mean {prefix}.{near[0]}?" if near else ""
        choices = nested or known
        what = f"{group} cannot be {inner}; known are {', '.join(choices)}" if choices else f"{group} has no {inner} to explain"
        raise UserError(f"{what}{hint} (--help {group} lists its keys)")
    cls, key = keys[name]
    yield f"{prefix}: {cls.__module__}.{cls.__name__}"
    yield from _of_key(key, f"{prefix}.")


def _nested(cls: type) -> dict[str, type]:
    """Return {field: its class} of the fields of a dataclass that are dataclasses themselves, such as `model.moe`."""
    hints = get_type_hints(cls).items() if dataclasses.is_dataclass(cls) else ()
    kinds = {name: (*get_args(hint), None)[0] for name, hint in hints}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


def _default_class(group: str) -> type:
    path = PLAIN.get(group) or default_class(group)
    assert path is not None, group
    return class_at(path)


def _others(group: str, cls: type) -> str:
    known = known_classes(group).items()
    ours_first = sorted(known, key=lambda item: not item[1].__module__.startswith("lit_llm."))  # others may be cut off
    names = [name for name, each in ours_first if each is not cls]
    return f"Others: {', '.join(names)}." if names else ""


_WARMUPS = {"fraction": "Instead of steps: a share of the schedule's.", "tokens": "Instead of steps: in tokens."}


def _keys(group: str, cls: type) -> list[Key]:
    described = _descriptions(cls)
    modules = [sys.modules.get(each.__module__) for each in inspect.getmro(cls)]  # a user's module may have been unloaded
    aliases = [(name, value) for module in modules if module is not None for name, value in vars(module).items()]
    named = {name: _type(value) for name, value in aliases if get_origin(value) in (Literal, Annotated)}
    changed = TRAINER if group == "trainer" else {}
    if group in CLASSES and cls is _default_class(group):
        changed = CLASSES[group].arguments or {}
    keys = []
    for name, parameter in all_arguments(cls).items():
        if name not in _SKIPPED:
            default = changed.get(name, parameter.default)
            kind = re.sub(r"\b[A-Z]\w+", lambda alias: named.get(alias[0], alias[0]), _type(parameter.annotation))
            domain = range_of(group, cls, name)
            if domain is not None and domain.low > -LARGEST:
                kind += f", {replace(domain, null=False).rule(domain.low - 1)}"  # null is in the type
            keys.append(Key(name, kind, _value(default), described.get(name, "")))
        if name == "warmup_steps":
            keys += [Key(f"warmup_{unit}", "float", "null", text) for unit, text in _WARMUPS.items()]
    return keys


def _descriptions(cls: type) -> dict[str, str]:
    """Return {argument or field: its description in the docstrings of `cls` and its base classes}."""
    descriptions: dict[str, str] = {}
    for each in reversed(inspect.getmro(cls)):
        if (each is cls or not dataclasses.is_dataclass(cls)) and each is not object:
            for source in (each, vars(each).get("__init__")):
                if source is not None and source.__doc__:
                    fields = dataclasses.is_dataclass(source)
                    for param in (parse_from_object(source) if fields else parse(source.__doc__)).params:
                        if param.description:
                            descriptions[param.arg_name] = " ".join(param.description.replace("``", "`").split())
    return descriptions


def _docstring(cls: type) -> str:
    """Return the docstring of a class, or of its `__init__` if the class has none (Lightning's Trainer), or its name."""
    return (cls.__doc__ and inspect.getdoc(cls)) or inspect.getdoc(vars(cls).get("__init__")) or cls.__name__


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else None
    if text is None:
        args = get_args(annotation)
        text = annotation.__name__ if isinstance(annotation, type) and not args else str(annotation)
    text = re.sub(r"^(?:typing\.)?Annotated\[(.+?), \w+\(.*\)\]$", r"\1", text)  # the range
    return text.replace("typing.", "").replace("NoneType", "null").replace("None", "null")


def _value(value: Any) -> str:
    if value is inspect.Parameter.empty or value is dataclasses.MISSING:
        return "required"
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


def _line(key: Key, prefix: str) -> str:
    return _shorten(f"  --{prefix}{key.name} = {key.default}".ljust(40) + f"  {key.help}")


def _shorten(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= WIDTH else line[: WIDTH - 1].rpartition(" ")[0] + " …"

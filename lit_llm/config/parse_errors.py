"""Explains mistakes in recipes and flags: all of them at once, each with the nearest right key or value.

jsonargparse explains a mistake in up to forty lines. This module turns them into one sentence.

Only this module reads jsonargparse's messages and decides which exceptions of constructors are a user's mistake.
"""

from __future__ import annotations

import ast
import copy
import difflib
import importlib
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger

from lit_llm.config.arguments import COMMAND_LINE, Assignment, as_list, leaves
from lit_llm.config.groups import CLASSES, default_class
from lit_llm.config.parser import RecipeParser, concrete_subclasses, known_classes
from lit_llm.config.spelling import short, unknown_key
from lit_llm.config.tree import Tree
from lit_llm.core.errors import UserError
from lit_llm.models.custom import class_problem

_OPTION = re.compile(r"[Oo]ption '([\w.]+)'|[Kk]ey ['\"]([\w.]+)['\"] is not|arguments: --([\w.]+)")
_MISSING = "following arguments are required: "


class Mistakes:
    """Collector of the wrong values in a tree of settings: `convert` finds and keeps them, `sentences` explains them."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._messages: dict[str, str] = {}  # of jsonargparse, by key

    def convert(self, parser: RecipeParser, values: dict[str, Any], default: dict[str, Any]) -> Namespace:
        """Return the values of a group in the types that its class declares, with the defaults of arguments not given.

        jsonargparse stops at the first mistake of a group. Then each value is converted alone. Wrong values are recorded, and
        replaced by the value of an earlier source or left out.

        Args:
            values: {the group: its value}.
            default: {the group: its default value}, converted instead if no value is left.

        Raises:
            UserError: jsonargparse refuses the group, but no single value of it.
        """
        config, message = _parsed(parser, values)
        if config is not None:
            return config
        wrong: dict[str, str] = {}
        tree, given = Tree(values), [key for key in self._tree.given if key.partition(".")[0] in values]
        for key in sorted(given, key=lambda key: key.count(".")):  # a class before its arguments
            if not any(key.startswith(f"{each}.") for each in wrong):
                others = [each for each in given if each != key and not key.startswith(f"{each}.")]
                _, alone = _parsed(parser, tree.without(others).values)
                wrong |= {key: alone} if alone and _MISSING not in alone else {}
        tree = tree.without(wrong)
        for key in wrong.keys() & self._tree.replaced.keys():
            tree.set(Assignment(key, self._tree.replaced[key], COMMAND_LINE))
        config, missing = _parsed(parser, tree.values or default)
        while config is None and _MISSING in missing and (key := ".".join(_keys_in(missing))) not in wrong:
            wrong |= {} if any(each.startswith(f"{key}.") for each in wrong) else {key: missing}
            tree = tree.without([key])
            config, missing = _parsed(parser, tree.values or default)
        if not wrong:
            raise UserError(reason(message))
        self._messages |= wrong
        return parser.parse_object(copy.deepcopy(default)) if config is None else config

    def sentences(self, config: Namespace, unknown: Iterable[str]) -> list[str]:
        """Return a sentence for each recorded mistake and each unknown key, in the order in which sources set the keys.

        Args:
            config: all settings without the mistakes.
            unknown: top-level keys of the tree that are neither a group nor an option.
        """
        known, given = [key for key, _ in leaves(config.as_dict())], self._tree.given
        mistakes = {key: _sentence(self._assignment(key), message, known) for key, message in self._messages.items()}
        mistakes |= {key: unknown_key(a, known) for key, a in given.items() if key.partition(".")[0] in unknown}
        order = list(given)
        return [mistakes[key] for key in sorted(mistakes, key=lambda key: order.index(key) if key in order else -1)]

    def _assignment(self, key: str) -> Assignment:
        below = [a for each, a in self._tree.given.items() if each.startswith(f"{key}.")]
        return self._tree.given.get(key) or replace((below or [Assignment("", None, COMMAND_LINE)])[-1], key=key)


def _parsed(parser: RecipeParser, values: dict[str, Any]) -> tuple[Namespace | None, str]:
    """Return (values in the types that `parser` declares, or None; why jsonargparse refuses `values`, or "")."""
    try:
        return parser.parse_object(copy.deepcopy(values)), ""  # it changes lists of classes
    except Exception as error:  # types of users' classes raise many
        return None, str(error)


def _keys_in(message: str) -> list[str]:
    """Return the parts of the key that a message of jsonargparse is about: [data, tokenizer] for data.tokenizer."""
    return re.findall(r'Parser key "([\w.]+)"', message) or message.partition(_MISSING)[2].split(", ")[:1]


def reason(error: str) -> str:
    """Return the line of an error's text that has the reason, cut to 300 characters: without jsonargparse's text around it."""
    lines = [line.strip(" -.") for line in error.splitlines() if line.strip()]
    own = [line for line in lines if re.search(r"\(--[\w.]+\)", line)]
    noise = ("Expected a", "Does not validate", "Problem with given", "Subtypes:", "Errors:", "Given value", "Parser key")
    return (own or [line for line in lines if not line.startswith(noise)] or [" ".join(lines)])[0][:300]


def is_mistake(error: Exception) -> bool:
    """Whether an exception caught while an object of the recipe was built can be reported without its traceback.

    lit_llm raises `UserError` for mistakes. The constructors of torch, Lightning and of users' classes raise ValueError and
    others. These exceptions count as mistakes too, unless the traceback has a function of lit_llm outside of config, which can
    have a bug.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:  # jsonargparse wraps errors of constructors
        chain.append(cause)
    return any(isinstance(each, UserError) for each in chain) or not any(_ran_lit_llm(each) for each in chain)


def _ran_lit_llm(error: BaseException) -> bool:
    """Whether the traceback of an error has a function of lit_llm that is not in lit_llm.config."""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module.startswith("lit_llm.") and not module.startswith("lit_llm.config."):
            return True
        trace = trace.tb_next
    return False


def _sentence(assignment: Assignment, error: str, known: list[str]) -> str:
    if problem := class_problem(assignment.key, assignment.value):
        return problem
    key, value, where = assignment.key, short(assignment.value), assignment.where
    if assignment.value in (None, "null") and key in known:
        return f"{key} is null, but needs a value (--{key})"  # as `ranges.null_problems` says it
    keys, classes = _keys_in(error), list(known_classes(key))
    if _MISSING in error:
        group, missing = ".".join(keys), error.partition(_MISSING)[2].partition("\n")[0].split(", ")
        if missing == [group]:
            return f"{group} is null, but needs a value (--{group})"
        entries = [e if isinstance(e, dict) else {"class_path": e} for e in as_list(assignment.value)]
        lacking = [e["class_path"] for e in entries if "class_path" in e and not {*missing} <= {*(e.get("init_args") or {})}]
        named = lacking or re.findall(r"class_path='([\w.]+)'", error) or [default_class(group)]
        flags = (
            f"--{key}"
            if isinstance(assignment.value, list) or value.startswith("'[")
            else ", ".join(f"--{group}.{name}" for name in missing)
        )
        return f"{group} is {str(named[0]).rpartition('.')[2]}, which needs {' and '.join(missing)} ({flags})"
    option = next((each for groups in _OPTION.findall(error) for each in groups if each), None)
    if option is not None and key.endswith(option):
        return unknown_key(assignment, known)
    if missing_name := _missing_class(key.removesuffix("+"), assignment.value):
        return f"{key} is {value}: {missing_name} {where}"
    if option is not None and isinstance(as_list(assignment.value)[0], dict):
        return f"{key} is {value}: no entry has an argument {option} {where}"
    error = error.rpartition('Parser key "')[2]  # the part about the innermost key
    named = assignment.value
    if classes and (not isinstance(named, str) or named.rpartition(".")[2] not in classes):
        hint = _did_you_mean(str(named), classes)
        return f"{key} is {value}, which is not a class that can be used here{hint} (known: {', '.join(classes)}) {where}"
    expected = re.findall(r"Expected an? (.+?)\. Got value", error) or re.findall(r"Subtypes: \[(.+)\]$", error, re.M)
    if expected:
        # A class may be expected around the value, such as the optimizer around its rate. The value's own type is last.
        own = next((each for each in expected if not re.search(r"\b(torch|lightning|lit_llm)\.", each)), expected[-1])
        kinds = re.sub(r"<class '([\w.]+)'>", r"\1", own).replace("NoneType", "null")
        kinds = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", kinds)
        if isinstance(named, int | float | list) and "str" in kinds.split(", "):
            return f"{key} is {named!r}, but must be text: put it in quotes {where}"
        if choices := _choices(kinds):
            near_values = difflib.get_close_matches(str(named), choices, n=3, cutoff=0.5)
            nearest = f" (nearest: {', '.join(near_values)})" if near_values else ""
            return f"{key} is {value}, it must be one of {', '.join(choices)}{nearest} {where}"
        return f"{key} is {value}, it must be of type {kinds} {where}"
    if "subclass of" in error or "dot import path" in error:
        return f"{key} is {value}, but must be a dict of settings {where}"
    return f"{key} is {value}: {reason(error)} {where}"


_IN_TRAINER: dict[str, type] = {"trainer.callbacks": Callback, "trainer.logger": Logger}


def _missing_class(key: str, value: Any) -> str | None:
    """Return the end of a sentence: which module or class that `value` names is missing, or cannot be imported.

    None: all of them exist, or the key takes no class.
    """
    base = _IN_TRAINER.get(key)
    if base is None and key not in CLASSES:
        return None
    for entry in as_list(value) or [value]:
        path = entry.get("class_path") if isinstance(entry, dict) else entry
        if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
            continue
        module, _, name = path.rpartition(".")
        if not module:  # of groups, the sentence about known classes
            names = [] if base is None else [cls.__name__ for cls in concrete_subclasses(base)]
            if names and name not in names:
                return f"there is no {base.__name__.lower()} {name}{_did_you_mean(name, names)}"  # type: ignore[union-attr]
            continue
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if module.rpartition(".")[2][:1].isupper():
                continue  # probably a class within a class
            if f"{module}.".startswith(f"{error.name}."):
                return f"there is no module {error.name}"
            return f"module {module} cannot be imported: {error}"
        except Exception as error:
            return f"module {module} cannot be imported: {type(error).__name__}: {error}"
        if not hasattr(imported, name):
            names = [each for each, cls in vars(imported).items() if isinstance(cls, type)]
            return f"module {module} has no class {name}{_did_you_mean(name, names)}"
    return None


def _did_you_mean(name: str, names: list[str]) -> str:
    return f"; did you mean {near}?" if (near := nearest_class(name, names)) else ""


def nearest_class(value: str, classes: list[str]) -> str | None:
    """Return the name in `classes` that is most similar to `value`, without regard to letter case; None if none is similar."""
    name = value.rpartition(".")[2].lower()
    by_lower = {each.lower(): each for each in reversed(classes)}
    near = difflib.get_close_matches(name, by_lower, n=1)
    return by_lower[near[0]] if near else None


def _choices(kinds: str) -> list[str]:
    """Return the possible values of a type, given as text, if it consists of Literal[…] and null alone; else []."""
    if re.sub(r"Literal\[[^\]]*\]|null|[,\s]", "", kinds):
        return []
    values = [str(value) for inner in re.findall(r"Literal\[([^\]]*)\]", kinds) for value in ast.literal_eval(f"[{inner}]")]
    return list(dict.fromkeys(values + ["null"] * ("null" in kinds))) if values else []

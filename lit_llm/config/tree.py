"""One tree of all settings that the sources of a run give: recipe files and flags.

The rule:

1. Recipe files apply in order, each base before its recipe. All flags together are the last source, wherever they stand. A
   later value of a setting replaces an earlier one: lists as a whole, dicts key by key.
2. A class starts with its own defaults; the short name `AdamW` with those of `class_defaults.fill_adamw`. If several flags
   name a class for the same key, the last one counts.
3. If a source names another class than earlier sources, the group's arguments in earlier sources are dropped. An argument is
   kept if a public class that both classes extend declares it: `Schedule` declares `warmup_steps`, `TokenDataModule` the batch
   sizes, `block_size`, `seed` and `num_workers`, `TextDataModule` also `tokenizer` and `cache_dir`. An argument that only the
   new class has is kept too. One line names the new class and the dropped arguments. config.yaml has only values that count.
4. Arguments given in the same source as the class, or later, are always kept. So flags are never dropped.
5. `null` in place of a class drops the arguments before it. If a later source gives arguments, or `{}`, and no class, the
   group has its default class again, or the only one it can have. Flags that set a group to null and give its arguments
   contradict each other, and are refused.

The rule holds for every key whose value is a class, such as `schedule`, `data.tokenizer` and `trainer.strategy`, and for every
way to write it: a dotted flag, a dict as a flag, YAML in a recipe, base or overlay.

Without this rule, `--optimizer AdamW` would train with a learning rate that was tuned for Muon.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from lit_llm.config.arguments import Arguments, Assignment, as_list, leaves
from lit_llm.config.class_defaults import all_arguments, own_arguments
from lit_llm.config.groups import ARCHITECTURE, CLASSES, OFF, PLAIN, TRAINER, WARMUPS, default_class
from lit_llm.config.parser import class_path, find_class
from lit_llm.core.errors import UserError

_NULL = (None, "null")
_EMPTY: tuple[Any, ...] = ({}, "{}")
_WEIGHTS = -2
"""The `source` of the settings that follow from the weights of `init_from`."""
_MAY_BE_CLASSES = ("strategy", "accelerator", "profiler")
"""Settings of the Trainer that are the path of a class, or a name that Lightning knows."""
_OF_CLASSES = ("trainer.callbacks", "trainer.logger", "trainer.plugins")
"""Lists of classes: a flag with an argument means their last class."""


@dataclass
class Tree:
    """The merged settings of the sources of a run, with the source of each setting.

    Attributes:
        values: the settings, as nested dicts like a recipe's. For a class without arguments, the value can be its name.
        given: {dotted key without `init_args`: the assignment that set its value}, in the order of setting.
        replaced: {dotted key that was set several times: the value before the present one, unless that was a dict or list}.
        notes: one sentence for each class whose arguments were dropped because another class replaced it.
        problems: one sentence for each setting that cannot be set, because it is within a list.
    """

    values: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Assignment] = field(default_factory=dict)
    replaced: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, arguments: Arguments, weights: Mapping[str, Any]) -> Tree:
        """Return the tree of the settings of all sources.

        Args:
            weights: {dotted key: setting that follows from the weights of `init_from`}, the first source. Not in `given`.

        Raises:
            UserError: One source turns a group off and gives its arguments.
        """
        assignments, tree = arguments.assignments, cls()
        first = [
            Assignment(key, value, "the weights of init_from", _WEIGHTS)
            for name, setting in weights.items()
            for key, value in (leaves(setting, f"{name}.") if isinstance(setting, dict) and setting else [(name, setting)])
        ]
        for _, source in groupby([*first, *assignments], key=lambda a: a.source):
            tree._apply(list(source))
        tree.given = {key: a for key, a in tree.given.items() if a.source != _WEIGHTS}
        return tree

    def get(self, key: str) -> Any:
        """Return the value of a dotted key without `init_args`; None if the key has no value."""
        node: Any = self.values
        for name in key.split("."):
            inner = node.get("init_args") or {} if isinstance(node, dict) and name not in node else node
            node = inner.get(name) if isinstance(inner, dict) else None
        return node

    def class_name(self, group: str) -> Any:
        """Return the name or path of a group's class as a source gives it; None if no source names a class."""
        value = self.values.get(group)
        return value.get("class_path") if isinstance(value, dict) else value

    def set(self, assignment: Assignment, value: Any = None) -> None:
        """Set the key of `assignment` in `values` to `value` (None: its own value). A key within a list is a problem."""
        key, value = assignment.key.removesuffix("+"), assignment.value if value is None else value
        parts = key.split(".")
        node = self._inside(parts, create=True)
        if node is None:
            self.problems.append(f"{key} is a part of a list, which is given as a whole {assignment.where}")
            return
        if key in self.given and not isinstance(node.get(parts[-1]), dict | list):
            self.replaced[key] = node.get(parts[-1])
        node[parts[-1]] = value
        self.given.pop(key, None)
        self.given[key] = assignment

    def remove(self, keys: Iterable[str]) -> list[Assignment]:
        """Remove the values of `keys` and of keys below these. Return the assignments that had set the removed values."""
        removed = []
        for key in keys:
            parts = key.split(".")
            node = self._inside(parts)
            if node is not None:
                node.pop(parts[-1], None)
            below = [each for each in self.given if f"{each}.".startswith(f"{key}.")]
            removed += [self.given.pop(each) for each in below]
        return removed

    def group(self, group: str) -> Any:
        """Return the value of `group` for its parser; None: the group is off. For a class, the value is {"class_path": …,
        "init_args": …}, with the default arguments that lit_llm sets for the group's default class."""
        value = self.values.get(group, {} if group in PLAIN and group not in OFF else None)
        if group == "trainer" and isinstance(value, dict):
            paths = {key: path for key in _MAY_BE_CLASSES if isinstance(path := value.get(key), str) and "." in path}
            return {**TRAINER, **value, **{key: {"class_path": path} for key, path in paths.items()}}
        if group not in (*CLASSES, ARCHITECTURE):
            return value
        default = CLASSES[group].value if group in CLASSES else None
        if group not in self.values:
            return default
        if value in _NULL:
            return None
        node = {"class_path": value} if isinstance(value, str) else value
        if not isinstance(node, dict):
            return node
        name = node.get("class_path", default_class(group))
        if name is None:
            return node
        name = class_path(group, name)
        arguments = node.get("init_args") or {}
        if default is not None and find_class(group, name) is find_class(group, default["class_path"]):
            arguments = {**default.get("init_args", {}), **arguments}
        tokenizer = arguments.get("tokenizer")
        if isinstance(tokenizer, dict) and "class_path" in tokenizer:
            tokenizer = {**tokenizer, "class_path": class_path("data.tokenizer", tokenizer["class_path"])}
            arguments = {**arguments, "tokenizer": tokenizer}
        return {"class_path": name, "init_args": arguments} | {key: node[key] for key in node if key == "dict_kwargs"}

    # ---- merging ------------------------------------------------------------------------------------------------

    def without(self, keys: Iterable[str]) -> Tree:
        """Return a tree with a copy of `values`, without the values of `keys` and without dicts that become empty by this."""
        tree = Tree(copy.deepcopy(self.values))
        tree.remove(keys)
        return Tree(_without_empty(tree.values, self.values))

    def _apply(self, source: list[Assignment]) -> None:
        """Apply one source: first the classes that it names, then all other values.

        Raises:
            UserError: The source sets a key to null and gives arguments below this key.
        """
        for off in (a for a in source if a.value in _NULL):
            if below := [a.key for a in source if a.key.startswith(f"{off.key}.")]:
                raise UserError(f"{off.key} is null, but {below[0]} is given too: remove one of them {off.where}")
        classes = {a.key: a for a in source if self._may_be_class(a, source)}
        for assignment in classes.values():
            self._choose(assignment)
        for assignment in source:
            if assignment.key not in classes or assignment.value in _EMPTY:
                self._put(assignment)

    def _may_be_class(self, assignment: Assignment, source: list[Assignment]) -> bool:
        key, value = assignment.key, assignment.value
        if not (value is None or isinstance(value, str)) or value in _EMPTY or key.startswith("trainer.callbacks"):
            return False
        below = isinstance(self.get(key), dict) or any(a.key.startswith(f"{key}.") for a in source)
        return below or key in CLASSES or key == ARCHITECTURE

    def _choose(self, assignment: Assignment) -> None:
        """Set the class of a key. Drop arguments of the class before it, by rule 3 of the module, and add a note."""
        key, value = assignment.key, assignment.value
        before = self.get(key)
        name = before.get("class_path") if isinstance(before, dict) else before
        arguments = (before.get("init_args") or {}) if isinstance(before, dict) else {}
        old, new = find_class(key, name or default_class(key)), find_class(key, value)
        weights = {each for each in arguments if (a := self.given.get(f"{key}.{each}")) and a.source == _WEIGHTS}
        weights &= all_arguments(new).keys() if new is not None else set()  # a tokenizer, whatever data it is for
        gone = [each for each in arguments if value in _NULL or not (each in weights or _keeps(key, old, new, each))]
        if isinstance(before, dict) and "class_path" not in before and key not in (*CLASSES, ARCHITECTURE):
            gone = list(before)  # a dict of settings, which a value replaces
        removed = self.remove(f"{key}.{each}" for each in gone)
        removed = [a for a in removed if a.source != _WEIGHTS]
        if removed and value not in _NULL:
            self.notes += _note(key, old, value, new, removed)
        kept: dict[str, Any] = {"init_args": {each: arguments[each] for each in arguments if each not in gone}}
        if old is not None and old is new and isinstance(before, dict) and "dict_kwargs" in before:
            kept["dict_kwargs"] = before["dict_kwargs"]
        self.set(assignment, {"class_path": value, **kept} if any(kept.values()) else value)

    def _put(self, assignment: Assignment) -> None:
        """Set the value of one assignment: a key with "+" appends to a list, and {} replaces nothing but null."""
        key, value = assignment.key.removesuffix("+"), copy.deepcopy(assignment.value)
        if key.endswith(".init_args"):
            return  # null or empty
        before = self.get(key)
        if value in _EMPTY and before not in _NULL:
            return
        if key in _OF_CLASSES and any(isinstance(entry, dict) for entry in as_list(value)):
            value = [_with_init_args(entry) for entry in as_list(value)]
        if assignment.key.endswith("+"):
            value = [*as_list(before), *as_list(value)]
        elif isinstance(before, dict):
            self.remove([key])
        self.set(assignment, {} if value in _EMPTY else value)

    def _inside(self, parts: list[str], *, create: bool = False) -> dict[str, Any] | None:
        """Return the dict in `values` that has, or can have, the last of the `parts` of a dotted key; None if there is no such
        dict. `create`: make the dicts that are missing on the way."""
        node = self.values
        for depth, (name, following) in enumerate(pairwise(parts)):
            below: Any = node.get(name)
            if isinstance(below, str) and below.lstrip().startswith("["):
                below = as_list(below)
            if not create and not isinstance(below, dict | list):
                return None
            if isinstance(below, list):
                if ".".join(parts[: depth + 1]) not in _OF_CLASSES or not below:
                    return None
                node[name] = below
                below[-1] = last = below[-1] if isinstance(below[-1], dict) else {"class_path": below[-1]}
                below = last
            elif below in _NULL or not isinstance(below, str | dict):
                node[name] = below = {}
            elif isinstance(below, str):
                path = ".".join(parts[: depth + 1])
                names_class = depth == 0 or parts[0] == "trainer" or find_class(path, below) is not None
                node[name] = below = {"class_path": below} if names_class else {}
            is_class = "class_path" in below or (depth == 0 and name in (*CLASSES, ARCHITECTURE))
            node = below.setdefault("init_args", {}) if is_class and following != "dict_kwargs" else below
        return node


def _with_init_args(entry: Any) -> Any:
    """Return an entry of a list of classes, with arguments that stand beside `class_path` moved into its `init_args`."""
    if not isinstance(entry, dict) or "class_path" not in entry or not isinstance(entry.get("init_args") or {}, dict):
        return entry
    beside = {key: value for key, value in entry.items() if key not in ("class_path", "init_args", "dict_kwargs")}
    kept = {key: value for key, value in entry.items() if key not in beside}
    return {**kept, "init_args": {**(entry.get("init_args") or {}), **beside}} if beside else entry


def _without_empty(values: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of nested dicts without dicts that are empty, unless these were empty in `before`."""
    kept = {}
    for key, value in values.items():
        inner = _without_empty(value, before[key]) if isinstance(value, dict) else value
        if inner != {} or before[key] == {}:
            kept[key] = inner
    return kept


def _keeps(key: str, old: type | None, new: type | None, argument: str) -> bool:
    """Whether `argument` of the class `old` is kept when the class `new` replaces it, by rule 3 of the module."""
    if old is None or new is None:
        return False
    if old is new:
        return True
    if ("warmup_steps" if argument in WARMUPS else argument) not in all_arguments(new):
        return False
    if argument in WARMUPS or (key in CLASSES and argument not in all_arguments(old)):
        return True
    common = [cls for cls in old.__mro__ if cls in new.__mro__ and not cls.__name__.startswith("_")]
    return any(argument in own_arguments(cls) for cls in common)


def _note(key: str, old: type | None, value: Any, new: type | None, gone: list[Assignment]) -> list[str]:
    """Return [a note on the dropped arguments and the defaults that replace them]; [] if all dropped values are defaults."""
    before, now = (
        {f"{key}.{name}": each.default for name, each in all_arguments(cls).items() if each.default is not each.empty}
        if cls is not None
        else {}
        for cls in (old, new)
    )
    gone = [
        a for a in gone if a.value != now.get(a.key, before.get(a.key)) and (a.key in before or a.value not in (None, False))
    ]
    values = ", ".join(f"{a.key}={a.value}" for a in gone)
    files = ", ".join(dict.fromkeys(a.origin for a in gone))
    instead, name = "" if old is None else f" instead of {old.__name__}", str(value).rpartition(".")[2]
    own = ", ".join(f"{a.key} {now[a.key]}" for a in gone if a.key in now)
    more = f"; {name} has its own default: {own}" if own else ""
    return [f"{key} is {name}{instead}, so these do not apply: {values} (in {files}){more}"] * bool(gone)

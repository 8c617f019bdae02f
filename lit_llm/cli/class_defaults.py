"""What happens to the arguments of a group when another class is chosen.

The rule:

1. Recipe files apply in order, each base before its recipe. All flags together are the last source.
2. A class starts with its own defaults.
3. If a source names another class than the sources before it, their arguments for the group are dropped. An argument is
   kept if a public class that both classes extend declares it: `Schedule` declares `warmup_steps`, `TokenDataModule` the batch
   sizes, `block_size`, `seed` and `num_workers`, `TextDataModule` also `tokenizer` and `cache_dir`.
4. Arguments given in the same source as the class, or later, are always kept. So flags are never dropped.

The rule holds for every key whose value is a class, such as `schedule`, `data.tokenizer` and `trainer.strategy`, and for every
way to write it: a dotted flag, a dict as a flag, YAML in a recipe, base or overlay.

Without it, `--optimizer AdamW` would train with a learning rate that was tuned for Muon.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from jsonargparse import Namespace

from lit_llm.cli.arguments import FLAGS, Arguments, Assignment

FindClass = Callable[[str, Any], type | None]
"""The class that a key's value names, given key and value; None if there is none."""


def drop_arguments_of_other_classes(arguments: Arguments, default: Callable[[str], Any], find: FindClass) -> Arguments:
    """The arguments without those that belong to a class which a later source replaces.

    Args:
        default: the default value of a key.
        find: finds the class of a value.
    """
    dropped: list[Assignment] = []
    kept: list[Assignment] = []
    current: dict[str, Any] = {}
    for assignment in arguments.assignments:
        key, value = assignment.key, assignment.value
        before = current.get(key, default(key))
        current[key] = value
        below = [a for a in kept if a.key.startswith(f"{key}.") and a.source not in (FLAGS, assignment.source)]
        if below and before != value:
            old, new = find(key, before), find(key, value)
            if old is None or old is not new:
                gone = [a for a in below if not _shared(old, new, a.key.removeprefix(f"{key}.").partition(".")[0])]
                dropped += gone
                kept = [a for a in kept if a not in gone]
                current = {k: v for k, v in current.items() if k not in {a.key for a in gone}}
        kept.append(assignment)
    return arguments.without(dropped) if dropped else arguments


def _shared(old: type | None, new: type | None, argument: str) -> bool:
    """Whether a public class that both classes extend declares the argument."""
    if old is None or new is None:
        return False
    common = [cls for cls in old.__mro__ if cls in new.__mro__ and not cls.__name__.startswith("_")]
    return any(argument in own_arguments(cls) for cls in common)


def own_arguments(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments that a class itself declares, without `**kwargs`."""
    init = vars(cls).get("__init__")
    if not inspect.isfunction(init):
        return {}
    parameters = list(inspect.signature(init).parameters.values())[1:]
    return {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def all_arguments(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class, including those that `**kwargs` pass on to base classes."""
    found: dict[str, inspect.Parameter] = {}
    for each in inspect.getmro(cls):
        init = vars(each).get("__init__")
        if not inspect.isfunction(init):
            continue
        found = found | {name: p for name, p in own_arguments(each).items() if name not in found}
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(init).parameters.values()):
            break
    return found


def restore_defaults(config: Namespace, before: Namespace, groups: Iterable[str], given: set[str], find: FindClass) -> None:
    """Set every argument that nobody gave to the default of the chosen class; in place.

    jsonargparse carries values from one class to the other, defaults included.

    Args:
        config: parsed.
        before: the parser's defaults.
        groups: keys that name a class.
        given: dotted keys that a recipe or a flag sets, without `init_args`.
        find: finds the class of a value.
    """
    for group in groups:
        chosen, default = config.get(group), before.get(group)
        if isinstance(chosen, Namespace) and "class_path" in chosen:
            _restore(group, chosen, default, given, find)


def _restore(key: str, chosen: Namespace, default: Any, given: set[str], find: FindClass) -> None:
    values = chosen.get("init_args", Namespace())
    cls = find(key, chosen.class_path)
    if isinstance(default, Namespace) and default.get("class_path") == chosen.class_path:
        own = vars(default.get("init_args", Namespace()))
    else:
        own = {name: p.default for name, p in all_arguments(cls).items() if p.default is not p.empty} if cls else {}
    for name, value in vars(values).items():
        below = f"{key}.{name}"
        if isinstance(value, Namespace) and "class_path" in value:
            # A class as a value, such as a tokenizer, can come from the weights of --init_from: it stays.
            _restore(below, value, own.get(name), given, find)
        elif name in own and not _is_given(below, given) and not dataclasses.is_dataclass(own[name]):
            values[name] = own[name]


def _is_given(key: str, given: set[str]) -> bool:
    return key in given or any(each.startswith(f"{key}.") for each in given)

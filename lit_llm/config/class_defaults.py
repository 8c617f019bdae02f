"""Which arguments of a group stay when another class is chosen.

The rule:

1. Recipe files apply in order, each base before its recipe. All flags together are the last source, wherever they stand. A
   later value of an argument replaces an earlier one.
2. A class starts with its own defaults; the short name `AdamW` with those of `fill_adamw`. If several flags name a class for
   the same key, the last one counts.
3. If a source names another class than the sources before it, their arguments for the group are dropped. An argument is
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

import dataclasses
import inspect
import math
from dataclasses import replace
from typing import Any, TypeGuard

from jsonargparse import Namespace

from lit_llm.config.arguments import FLAGS, Arguments, Assignment, Flag, RecipeFile, plain_key, with_init_args
from lit_llm.config.groups import ARCHITECTURE, CLASSES, WARMUPS, default_class
from lit_llm.config.parser import find_class
from lit_llm.core.errors import UserError

_NULL = (None, "null")
_NO_ARGUMENTS: tuple[Any, ...] = ({}, "{}")


def drop_arguments_of_other_classes(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """The arguments without those that belong to a class which a later source replaces, and one sentence for each such class.

    Raises:
        UserError: Flags turn a group off and give its arguments.
    """
    last = {plain_key(item.key): item for item in arguments.items if isinstance(item, Flag)}
    items = [item for item in arguments.items if not _names_class(item) or item is last[plain_key(item.key)]]
    arguments = replace(arguments, items=items)
    _refuse_null_with_arguments(arguments.assignments)
    dropped: list[Assignment] = []
    notes: list[str] = []
    kept: list[Assignment] = []
    current: dict[str, Any] = {}
    early: list[tuple[int, str, Any]] = []  # source of arguments for a later class, its key, its name
    for assignment in arguments.assignments:
        key, value = assignment.key, assignment.value
        for group in [group for group, cls in current.items() if cls in _NULL and key.startswith(f"{group}.")]:
            current[group] = default_class(group)  # its arguments turn it on again
        if value in _NO_ARGUMENTS:
            kept.append(assignment)
            if current.get(key, key) in _NULL:
                current[key] = default_class(key)
            continue
        before = current.get(key, default_class(key))
        current[key] = value
        below = [a for a in kept if a.key.startswith(f"{key}.") and a.source not in (FLAGS, assignment.source)]
        if below and before != value:
            old, new = find_class(key, before), find_class(key, value)
            if old is None or old is not new:
                ours = [a for a in below if key in CLASSES and _is_only_of(new, old, _argument(a, key))]
                early += [(a.source, key, value) for a in ours]
                gone = [a for a in below if a not in ours and not _shared(old, new, _argument(a, key))]
                if gone and value not in _NULL:
                    notes += _note(key, old, value, new, gone)
                dropped += gone
                kept = [a for a in kept if a not in gone]
                current = {k: v for k, v in current.items() if k not in {a.key for a in gone}}
        kept.append(assignment)
    arguments = arguments.without(dropped) if dropped else arguments
    items = [*arguments.items]
    for source, key, value in early:
        file = items[source]
        assert isinstance(file, RecipeFile)
        content = {**file.content, key: {**file.content[key], "class_path": value}}
        items[source] = RecipeFile(file.path, with_init_args(content))
    return replace(arguments, items=items), notes


def _argument(assignment: Assignment, key: str) -> str:
    return assignment.key.removeprefix(f"{key}.").partition(".")[0]


def _is_only_of(new: type | None, old: type | None, argument: str) -> bool:
    return new is not None and old is not None and argument in all_arguments(new) and argument not in all_arguments(old)


def _names_class(item: RecipeFile | Flag) -> TypeGuard[Flag]:
    if not isinstance(item, Flag) or (key := plain_key(item.key)).startswith("trainer.callbacks"):
        return False
    return item.value == "null" or find_class(key, item.value) is not None


def _refuse_null_with_arguments(assignments: list[Assignment]) -> None:
    flags = [a for a in assignments if a.source == FLAGS]
    for off in (a.key for a in flags if a.value == "null"):
        if below := [a.key for a in flags if a.key.startswith(f"{off}.")]:
            raise UserError(f"{off} is null, but {below[0]} is given too: remove one of them (--{off})")


def _note(key: str, old: type | None, value: Any, new: type | None, gone: list[Assignment]) -> list[str]:
    """A note on the dropped arguments and the defaults that count instead. Dropped values that are defaults are left out."""
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


def _shared(old: type | None, new: type | None, argument: str) -> bool:
    """Whether a public class that both classes extend declares the argument."""
    if old is None or new is None:
        return False
    if argument in WARMUPS:
        return "warmup_steps" in all_arguments(new)
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
    arguments: dict[str, inspect.Parameter] = {}
    for each in inspect.getmro(cls):
        init = vars(each).get("__init__")
        if not inspect.isfunction(init):
            continue
        arguments = arguments | {name: p for name, p in own_arguments(each).items() if name not in arguments}
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(init).parameters.values()):
            break
    return arguments


def fill_adamw(config: Namespace, given: set[str]) -> list[str]:
    """Set options of `--optimizer AdamW` that no source sets to values for language models, in place. Returns a note.

    β and decay are GPT-3's (Brown et al. 2020, appendix B). The rate is 0.003239 − 0.0001395 ln N for N = 12 · layers · width²,
    at most 10^10 (Kaplan et al. 2020, D.1), where nothing else decides it: trained weights, adapters, rates by width.
    """
    model, values = config.model, dict[str, Any](betas=(0.9, 0.95), weight_decay=0.1)
    if all(each is None for each in (config.init_from, config.lora, config.get(ARCHITECTURE), model.base_width)):
        size = min(max(12 * model.n_layer * model.n_embd**2, 1), 1e10)
        values["lr"] = float(f"{0.003239 - 0.0001395 * math.log(size):.3g}")
    arguments, changes = config.optimizer.init_args, []
    for name, value in values.items():
        if f"optimizer.{name}" not in given:
            changes.append(f"{name} {value}{' by the size' if name == 'lr' else ''} (torch: {arguments[name]})")
            arguments[name] = value
    return [f"optimizer AdamW has {', '.join(changes)} (--optimizer torch.optim.AdamW)"] if changes else []


def restore_defaults(config: Namespace, before: Namespace, given: set[str]) -> None:
    """Set every argument that nobody gave to the default of the chosen class; in place.

    jsonargparse carries values from one class to the other, defaults included. `before`: the parser's defaults. `given`: dotted
    keys that a recipe or a flag sets, without `init_args`.
    """
    for group in (*CLASSES, "trainer.strategy"):
        chosen, default = config.get(group), before.get(group)
        if isinstance(chosen, Namespace) and "class_path" in chosen:
            _restore(group, chosen, default, given)


def _restore(key: str, chosen: Namespace, default: Any, given: set[str]) -> None:
    values = chosen.get("init_args", Namespace())
    cls = find_class(key, chosen.class_path)
    if isinstance(default, Namespace) and default.get("class_path") == chosen.class_path:
        own = vars(default.get("init_args", Namespace()))
    else:
        own = {name: p.default for name, p in all_arguments(cls).items() if p.default is not p.empty} if cls else {}
    for name, value in vars(values).items():
        below = f"{key}.{name}"
        if isinstance(value, Namespace) and "class_path" in value:
            # A class as a value, such as a tokenizer, can come from the weights of --init_from: it stays.
            _restore(below, value, own.get(name), given)
        elif (
            name in own
            and not any(f"{each}.".startswith(f"{below}.") for each in given)
            and not dataclasses.is_dataclass(own[name])
        ):
            values[name] = own[name]

"""Finds values of a recipe that its arguments do not allow: numbers outside their range, and null.

lit_llm's classes state the ranges of their arguments; this module has the ranges for classes of torch and Lightning.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Collection, Iterator
from types import NoneType, UnionType
from typing import Any, NamedTuple

from jsonargparse import Namespace

from lit_llm.config.class_defaults import all_arguments
from lit_llm.config.groups import OFF, OPTIONS, PLAIN, Command, options_of
from lit_llm.config.parser import class_at, find_class
from lit_llm.core.number_domain import LARGEST, STEPS, Domain, above, at_least, below, ranges_of, whole

_RATE = 10_000
_BATCHES = Domain(1, LARGEST, fraction=True, null=True)
_BATCHES_OR_NONE = Domain(1, LARGEST, fraction=True, null=True, also=(0,))

OF_LIBRARIES: dict[str, dict[str, Domain]] = {
    "optimizer": {
        "lr": at_least(0, _RATE),
        "lr_decay": at_least(0, _RATE),
        "weight_decay": at_least(0, _RATE),
        "betas": below(0, 1),
        "momentum": below(0, 1),
        "dampening": at_least(0, 1),
        "momentum_decay": at_least(0, _RATE),
        "eps": above(0, 1),
        "ns_steps": whole(1, 99),
        "ns_coefficients": at_least(-_RATE, _RATE),
        "alpha": at_least(0, 1),
        "lambd": at_least(0, _RATE),
        "t0": at_least(0, STEPS),
        "rho": at_least(0, 1),
        "initial_accumulator_value": at_least(0, STEPS),
        "beta2_decay": Domain(-_RATE, 0),
        "d": at_least(1, _RATE),
        "etas": above(0, _RATE),
        "step_sizes": at_least(0, _RATE),
    },
    "trainer": {
        "devices": Domain(high=1024, whole=True),  # `devices_problem` checks the rest: it may also be a list, or text
        "num_nodes": whole(1, 1_000_000),
        "max_steps": whole(1, STEPS, also=(-1,)),
        "min_steps": whole(0, STEPS, null=True),
        "max_epochs": whole(1, 10**9, null=True, also=(-1,)),
        "min_epochs": whole(0, 10**9, null=True),
        "fast_dev_run": whole(0, 10**6),
        "limit_train_batches": _BATCHES,
        "limit_val_batches": _BATCHES_OR_NONE,
        "limit_test_batches": _BATCHES_OR_NONE,
        "limit_predict_batches": _BATCHES_OR_NONE,
        "overfit_batches": Domain(1, LARGEST, fraction=True, also=(0,)),
        "val_check_interval": _BATCHES,
        "check_val_every_n_epoch": whole(1, 10**9, null=True),
        "num_sanity_val_steps": whole(0, STEPS, null=True, also=(-1,)),
        "log_every_n_steps": whole(1, STEPS, null=True),
        "accumulate_grad_batches": whole(1, 10**9),
        "gradient_clip_val": at_least(0, 10**9, null=True),
        "reload_dataloaders_every_n_epochs": whole(0, 10**9),
        "max_time": at_least(0, 10**9),
    },
}
"""Ranges of arguments of torch's optimizers and of Lightning's Trainer, by group and argument."""

ANY_NUMBER = Domain()
"""The range of numbers for which no range is stated, such as those of users' classes."""

_OURS = ("lit_llm", "torch", "lightning")


def range_of(key: str, cls: type | None, name: str) -> Domain | None:
    """Return the range of the argument `name`, None if no range is stated for it.

    Args:
        key: the key of the class, such as `optimizer`; "" for an option of the launch.
        cls: the class that has the argument; None for an option of the launch.
    """
    if cls is None:
        return next((option.range for option in OPTIONS if option.name == name), None)
    domain = ranges_of(cls).get(name)
    if domain is None and cls.__module__.partition(".")[0] in _OURS[1:]:
        domain = OF_LIBRARIES.get(key, {}).get(name)
    return domain


class Argument(NamedTuple):
    """Record of an argument in a parsed recipe, with its dotted key: of the class `cls`, or if that is None, of the launch."""

    key: str
    cls: type | None
    name: str
    value: Any


def arguments_in(config: Namespace) -> Iterator[Argument]:
    """Yield every option of the launch and every argument of the classes in a parsed recipe, also of classes within values."""
    for name, value in vars(config).items():
        if name in PLAIN and isinstance(value, Namespace):
            yield from _of_class(name, class_at(PLAIN[name]), vars(value))
        else:
            yield Argument(name, None, name, value)
            yield from _inside(name, value)


def _of_class(key: str, cls: type, values: dict[str, Any]) -> Iterator[Argument]:
    for name, value in values.items():
        yield Argument(f"{key}.{name}", cls, name, value)
        yield from _inside(f"{key}.{name}", value)


def _inside(key: str, value: Any) -> Iterator[Argument]:
    """Yield the arguments of the classes in `value`, the value of `key`, at any depth."""
    if isinstance(value, list):
        for each in value:
            yield from _inside(key, each)
    elif isinstance(value, Namespace | dict):
        path, items = value.get("class_path"), vars(value) if isinstance(value, Namespace) else value
        if isinstance(path, str):
            given = [items.get(part) or {} for part in ("init_args", "dict_kwargs")]
            # `{**Namespace}` would flatten the classes inside it.
            arguments = {k: v for each in given for k, v in (vars(each) if isinstance(each, Namespace) else each).items()}
            yield from _of_class(key, find_class(key, path) or object, arguments)
        else:
            for name, each in items.items():
                yield from _inside(f"{key}.{name}", each)


def number_problems(config: Namespace, given: Collection[str]) -> dict[str, str]:
    """Return {dotted key: sentence} for each number outside its range.

    Args:
        config: a parsed recipe.
        given: keys that a recipe or a flag sets. The values of other keys are defaults: they are checked only for classes of
            lit_llm, torch and Lightning, because another class may have a default such as infinity.
    """
    problems: dict[str, str] = {}
    for argument in arguments_in(config):
        group, _, _ = argument.key.rpartition(".")
        ours = argument.cls is None or argument.cls.__module__.partition(".")[0] in _OURS
        for key, domain, value in _numbers(argument.key, range_of(group, argument.cls, argument.name), argument.value):
            checked = key in given or (domain is not None and ours)
            if checked and key not in problems and (problem := (domain or ANY_NUMBER).problem(key, value)):
                problems[key] = problem
    return problems


def _numbers(key: str, domain: Domain | None, value: Any) -> Iterator[tuple[str, Domain | None, Any]]:
    """Yield (key, range, number) of each number in the value of an argument, without numbers of classes in this value."""
    if isinstance(value, Namespace | dict):
        items = vars(value) if isinstance(value, Namespace) else value
        if not isinstance(items.get("class_path"), str):
            for name, each in items.items():  # a dict of Trainer's val_check_interval is a time
                one = domain is not None and not domain.fraction
                yield from _numbers(key if one else f"{key}.{name}", domain if one else None, each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(key, domain, each)
    elif key == "trainer.devices" and isinstance(value, str) and value.isdecimal():
        yield key, domain, int(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, domain, value


# -- null ---------------------------------------------------------------------------------------------------------------

_NEEDED = (*(group for group in PLAIN if group not in OFF), "objective", "optimizer", "data")
"""Groups that a run cannot do without."""


def null_problems(command: Command, config: Namespace) -> list[str]:
    """Return a sentence for each key that is null and must not be. jsonargparse accepts null for any type in a recipe file."""
    keys = [option.name for option in options_of(command) if config[option.name] is None and not _optional(option.type)]
    keys += [group for group in _NEEDED if config.get(group) is None]
    keys += [
        each.key for each in arguments_in(config) if each.value is None and each.cls and not _accepts_null(each.cls, each.name)
    ]
    return [f"{key} is null, but needs a value (--{key})" for key in dict.fromkeys(keys)]


def _accepts_null(cls: type, argument: str) -> bool:
    """Whether an argument can be null: its default is None, or its type allows None, or no class declares its type."""
    declared = next((each for each in inspect.getmro(cls) if argument in _own_hints(each)), None)
    parameter = all_arguments(cls).get(argument)
    if parameter is not None and parameter.default is None:
        return True
    return declared is None or _optional(_own_hints(declared)[argument])


@functools.cache
def _own_hints(cls: type) -> dict[str, Any]:
    """Return {argument: type} of a class's own arguments; {} if a type is imported only for type checkers."""
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

"""Numbers of a recipe outside their range. lit_llm states a range at the argument; those of torch and Lightning are here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace

from lit_llm.config.arguments import Arguments
from lit_llm.config.groups import OPTIONS, PLAIN
from lit_llm.config.parser import find_class
from lit_llm.core.number_domain import LARGEST, STEPS, Domain, above, at_least, below, ranges_of, whole
from lit_llm.core.yaml_reading import read_yaml

_RATE = 10_000
_BATCHES = Domain(1, LARGEST, fraction=True, null=True)
_BATCHES_OR_NONE = Domain(1, LARGEST, fraction=True, null=True, also=(0,))

OF_LIBRARIES: dict[str, dict[str, Domain]] = {
    "optimizer": {
        "lr": at_least(0, _RATE),
        "adamw_lr": at_least(0, _RATE),
        "lr_decay": at_least(0, _RATE),
        "weight_decay": at_least(0, _RATE),
        "betas": below(0, 1),
        "momentum": below(0, 1),
        "dampening": at_least(0, 1),
        "momentum_decay": at_least(0, _RATE),
        "eps": at_least(0, 1),
        "normuon_beta2": Domain(0, 1, below_high=True, null=True),
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
"""By group and argument: of optimizers, torch's and those with its options, and of Lightning's Trainer."""

ANY_NUMBER = Domain()
"""For numbers of classes that are not lit_llm's, torch's or Lightning's."""


def range_of(key: str, cls: type | None, name: str) -> Domain | None:
    """The range of an argument; None if none is stated.

    Args:
        key: of the class, such as `optimizer`; "" for the launch itself.
        cls: that has the argument; None for the launch.
    """
    if cls is None:
        return next((option.range for option in OPTIONS if option.name == name), None)
    domain = ranges_of(cls).get(name)
    if domain is None and cls.__module__.partition(".")[0] in ("lit_llm", "torch", "lightning"):
        domain = OF_LIBRARIES.get(key, {}).get(name)
    return domain


def number_problems(config: Namespace, given: set[str]) -> dict[str, str]:
    """A sentence for each number outside its range, by dotted key.

    Args:
        config: a parsed recipe.
        given: keys that a recipe or a flag sets. Defaults of foreign classes, such as infinity, are not checked.
    """
    found: dict[str, str] = {}
    for key, domain, value in _arguments("", None, vars(config)):
        if (domain or key in given) and key not in found and (problem := (domain or ANY_NUMBER).problem(key, value)):
            found[key] = problem
    return found


def _arguments(key: str, cls: type | None, values: dict[str, Any]) -> Iterator[tuple[str, Domain | None, Any]]:
    """Key, range and value of every number among the arguments of a class, or among the keys of a recipe."""
    for name, value in values.items():
        below_key = f"{key}.{name}".lstrip(".")
        if cls is None and name in PLAIN and isinstance(value, Namespace):
            yield from _arguments(name, find_class(name, PLAIN[name]), vars(value))
        else:
            yield from _numbers(below_key, range_of(key, cls, name), value)


def _numbers(key: str, domain: Domain | None, value: Any) -> Iterator[tuple[str, Domain | None, Any]]:
    if isinstance(value, Namespace | dict):
        items = dict(vars(value)) if isinstance(value, Namespace) else value
        if isinstance(items.get("class_path"), str):
            arguments = {**(items.get("init_args") or {}), **(items.get("dict_kwargs") or {})}
            yield from _arguments(key, find_class(key, items["class_path"]) or object, arguments)
            return
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


def restore_whole_numbers(config: Namespace, arguments: Arguments) -> None:
    """Undo that a count such as `limit_val_batches: 20` was parsed as a fraction, 20.0.

    The parser tries the types of a union in order. `typing` gives Lightning's `Union[int, float]` in the order that some
    module used first in this process.
    """
    for key in (f"trainer.{name}" for name, domain in OF_LIBRARIES["trainer"].items() if domain.fraction):
        given = arguments.value_of(key)
        given = read_yaml(given) if isinstance(given, str) else given
        if isinstance(config.get(key), float) and isinstance(given, int):
            config[key] = given

"""The parsers of recipes: one of jsonargparse for each group, and the classes that a group can name."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import os
from typing import Any, Literal, NoReturn, get_args, get_type_hints

import lightning.pytorch
import torch
from jsonargparse import set_dumper, set_loader
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser
from torch.optim import Optimizer

import lit_llm.data
import lit_llm.optim
import lit_llm.training.distillation  # other objectives than the default
import lit_llm.training.preference
from lit_llm.config.arguments import flag_value
from lit_llm.config.groups import ARCHITECTURE, CLASSES, OFF, PLAIN, Command, options_of
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import InvalidYaml, dump_yaml

set_loader("recipe", flag_value, (InvalidYaml,))
set_dumper("yaml", dump_yaml)  # quotes the texts that `flag_value` would read as something else


class RecipeParser(LightningArgumentParser):
    """Parser of jsonargparse for recipes. A mistake raises UserError instead of ending the process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"parser_mode": "recipe", **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(message) from ex


@functools.cache
def parser_of(group: str) -> RecipeParser:
    """Return the parser of one group, made once, which converts values of the group to the types that its class declares.

    Removes JSONARGPARSE_DEFAULT_ENV from the environment of this process.
    """
    os.environ.pop("JSONARGPARSE_DEFAULT_ENV", None)  # it would make jsonargparse read settings from environment variables
    parser = RecipeParser(exit_on_error=False)
    if group in OFF:
        parser.add_argument(f"--{group}", type=class_at(PLAIN[group]) | None, default=None)
    elif group == "trainer":
        _add_trainer(parser)
    elif group in PLAIN:
        parser.add_class_arguments(class_at(PLAIN[group]), group)
    else:
        base = torch.nn.Module if group == ARCHITECTURE else class_at(CLASSES[group].base)
        skip = {ARCHITECTURE: {"vocab_size"}, "optimizer": {"params"}}.get(group, set())
        # Commands make optimizers and the user's own models themselves, when their parameters or the vocabulary are known.
        parser.add_subclass_arguments((base,), group, required=False, instantiate=not skip, fail_untyped=False, skip=skip)
    return parser


@functools.cache
def parser_of_options(command: Command) -> RecipeParser:
    """Return the parser of the options (`groups.Option`) that a command accepts, made once for each command."""
    header = [f"lightning.pytorch=={lightning.pytorch.__version__}"]
    parser = RecipeParser(exit_on_error=False, dump_header=header)
    for option in options_of(command):
        parser.add_argument(f"--{option.name}", type=option.type, default=option.default)
    return parser


def _add_trainer(parser: RecipeParser) -> None:
    """Add the arguments of Lightning's Trainer to a parser, with one more precision: auto.

    The types of a union are tried in order, so int is sorted first, and 20 stays an int. Without sorting, the order would be
    the one in which some module of this process first wrote `Union[int, float]`.
    """
    trainer = class_at(PLAIN["trainer"])
    types = get_type_hints(trainer.__init__)  # type: ignore[misc]
    own = {name: hint for name, hint in types.items() if {int, float} <= {*get_args(hint)}} | {"precision": types["precision"]}
    parser.add_class_arguments(trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip={*own})
    assert parser.groups is not None
    for name, hint in own.items():
        also = (Literal["auto"],) if name == "precision" else ()
        kinds = sorted((*get_args(hint), *also), key=lambda kind: kind is not int)
        default = inspect.signature(trainer).parameters[name].default
        parser.groups["trainer"].add_argument(f"--trainer.{name}", type=functools.reduce(operator.or_, kinds), default=default)


def class_at(class_path: str) -> type:
    """Import and return the class of lit_llm, torch or Lightning with this path, which must exist."""
    cls = find_class("", class_path)
    assert cls is not None, class_path
    return cls


def find_class(key: str, value: Any) -> type | None:
    """Return the class that `value` names: by a short name known for `key`, or by its path, which is imported; else None."""
    if not isinstance(value, str):
        return None
    if "." not in value:
        return known_classes(key).get(value)
    module, _, name = value.rpartition(".")
    try:
        # Not with pydoc.locate: `torch.optim.adamw` is a module, but not an attribute of `torch.optim`.
        cls = getattr(importlib.import_module(module), name, None)
    except Exception:
        return None  # the parser reports it
    return cls if isinstance(cls, type) else None


def known_classes(key: str) -> dict[str, type]:
    """Return {short name: class} of the classes that the value of `key` can name; {} for keys that do not take a class."""
    return {cls.__name__: cls for cls in sorted(_classes(key), key=lambda cls: (cls.__name__, _is_meant(cls)))}


def class_path(key: str, value: Any) -> Any:
    """Return the class path that `value` means if it is the short name of several classes (Adafactor); else `value`."""
    if [cls.__name__ for cls in _classes(key)].count(value) < 2:
        return value
    cls = known_classes(key)[value]
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_meant(cls: type) -> bool:
    """Whether a class is from lit_llm, torch or Lightning. A short name that several classes share means such a class."""
    return cls.__module__.startswith(("lit_llm.", "torch.", "lightning."))


def _classes(key: str) -> list[type]:
    if key == "data.tokenizer":
        known = concrete_subclasses(lit_llm.data.Tokenizer)
        return [cls for cls in known if not cls.__module__.startswith("lit_llm.runs.")]  # that one reads an export
    return concrete_subclasses(class_at(CLASSES[key].base)) if key in CLASSES else []


def concrete_subclasses(base: type) -> list[type]:
    """Return the public and concrete ones of `base` and all its subclasses, without LightningDataModule and Optimizer."""
    classes, queue = [], [base]
    while queue:
        cls = queue.pop()
        queue += cls.__subclasses__()
        abstract = bool(getattr(cls, "__abstractmethods__", None))
        if not abstract and not cls.__name__.startswith("_") and cls not in (LightningDataModule, Optimizer):
            classes.append(cls)
    return list(dict.fromkeys(classes))

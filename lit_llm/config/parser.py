"""The parser of recipes: every option and group as jsonargparse arguments, and the classes that a group can name."""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal, NoReturn, get_type_hints

import lightning.pytorch
import torch
from jsonargparse import SUPPRESS, ActionConfigFile, set_dumper, set_loader
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser
from torch.optim import Optimizer

import lit_llm.data
import lit_llm.optim
import lit_llm.training.distillation  # other objectives than the default
import lit_llm.training.preference
from lit_llm.config.groups import ARCHITECTURE, CALLBACKS, CLASSES, OFF, PLAIN, TRAINER, Command, options_of
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import InvalidYaml, dump_yaml, read_yaml
from lit_llm.training.objective import Objective


def _load(text: str) -> Any:
    """Read YAML text, which is the value of a flag or the content of a recipe file."""
    value = read_yaml(text)
    if isinstance(value, dict) and text.strip(" {}").replace(" ", "").rstrip(":").split(",") == list(value):
        return text  # `{a, b}` and `a:` are dicts of nulls in YAML, but a flag means text by them
    return value


set_loader("recipe", _load, (InvalidYaml,))
set_dumper("yaml", dump_yaml)  # quotes the texts that `_load` would read as something else


class RecipeParser(LightningArgumentParser):
    """Raises UserError instead of exiting, so that all mistakes can be gathered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"parser_mode": "recipe", **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(message) from ex


def make_parser(command: Command, defaults: dict[str, Any] | None = None) -> RecipeParser:
    """The parser of one command.

    Args:
        defaults: default values by dotted key, instead of those in `lit_llm.config.groups`.
    """
    os.environ.pop("JSONARGPARSE_DEFAULT_ENV", None)  # it would make jsonargparse read settings from environment variables
    header = [f"lightning.pytorch=={lightning.pytorch.__version__}"]
    parser = RecipeParser(prog=f"python -m lit_llm {command}", exit_on_error=False, dump_header=header)
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    for option in options_of(command):
        hidden = SUPPRESS if command not in option.commands else option.help
        parser.add_argument(f"--{option.name}", type=option.type, default=option.default, help=hidden)
    for group in ("model", "loss", "compute"):
        parser.add_class_arguments(class_at(PLAIN[group]), group)
        if group == "model":
            _add_architecture(parser)
    for group in OFF:
        parser.add_argument(f"--{group}", type=class_at(PLAIN[group]) | None, default=None)
    parser.add_subclass_arguments((Objective,), "objective", required=True)
    parser.add_subclass_arguments(
        (Optimizer,), "optimizer", instantiate=False, fail_untyped=False, skip={"params"}, required=True
    )
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=True)
    for group, settings in CALLBACKS.items():
        parser.add_lightning_class_args(class_at(settings.base), group, subclass_mode=True, required=False)
    _add_trainer(parser)
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER.items()})
    parser.set_defaults({group: settings.value for group, settings in CLASSES.items()})
    parser.set_defaults(defaults or {})
    return parser


def _add_architecture(parser: RecipeParser) -> None:
    parser.add_subclass_arguments(
        (torch.nn.Module,),
        ARCHITECTURE,
        instantiate=False,
        fail_untyped=False,
        skip={"vocab_size"},
        required=False,
        help="Your own model, by the path of its class (docs/own-model.md).",
    )


def _add_trainer(parser: RecipeParser) -> None:
    """Add the arguments of Lightning's Trainer to the parser, with one more precision: auto."""
    trainer = class_at(PLAIN["trainer"])
    parser.add_class_arguments(trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip={"precision"})
    known = get_type_hints(trainer.__init__)["precision"]  # type: ignore[misc]
    assert parser.groups is not None
    parser.groups["trainer"].add_argument(
        "--trainer.precision",
        type=known | Literal["auto"],
        default=None,
        help="As Lightning's Trainer takes it. auto: bf16-mixed if the device has units for bf16, else 32-true.",
    )


def class_at(class_path: str) -> type:
    """The class of lit_llm, torch or Lightning with this path, which must exist."""
    cls = find_class("", class_path)
    assert cls is not None, class_path
    return cls


def find_class(key: str, value: Any) -> type | None:
    """The class that the value of a key names, by its short name or its class path; None if there is none."""
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
    """The classes that a group can name, by their short names; none for keys that do not take a class."""
    return {cls.__name__: cls for cls in sorted(_classes(key), key=lambda cls: (cls.__name__, _is_meant(cls)))}


def class_path(key: str, value: Any) -> Any:
    """The path of the class that a short name means if several classes have it, such as Adafactor; else the value unchanged."""
    if [cls.__name__ for cls in _classes(key)].count(value) < 2:
        return value
    cls = known_classes(key)[value]
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_meant(cls: type) -> bool:
    """Whether a short name that several classes have means this class: it does if the class is no other package's."""
    return cls.__module__.startswith(("lit_llm.", "torch.", "lightning."))


def _classes(key: str) -> list[type]:
    if key == "data.tokenizer":
        known = concrete_subclasses(lit_llm.data.Tokenizer)
        return [cls for cls in known if not cls.__module__.startswith("lit_llm.runs.")]  # that one reads an export
    return concrete_subclasses(class_at(CLASSES[key].base)) if key in CLASSES else []


def concrete_subclasses(base: type) -> list[type]:
    """The base class and every class below it that is public and not abstract."""
    classes, queue = [], [base]
    while queue:
        cls = queue.pop()
        queue += cls.__subclasses__()
        abstract = bool(getattr(cls, "__abstractmethods__", None))
        if not abstract and not cls.__name__.startswith("_") and cls not in (LightningDataModule, Optimizer):
            classes.append(cls)
    return list(dict.fromkeys(classes))

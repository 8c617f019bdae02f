"""From arguments to a parsed recipe. Nothing is built here, nothing is written, and of all files only recipes are read."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch.nn import Module

from lit_llm.config.arguments import FLAGS, Arguments, Assignment, Flag, leaves, needs_value, plain_key, read
from lit_llm.config.class_defaults import all_arguments, drop_arguments_of_other_classes, fill_adamw, restore_defaults
from lit_llm.config.groups import ARCHITECTURE, CLASSES, OF_ARCHITECTURES, Command, default_class
from lit_llm.config.mixture_keys import refuse_wrong_shapes, with_empty_sources
from lit_llm.config.parse_errors import explain, reason
from lit_llm.config.parser import RecipeParser, class_path, find_class, known_classes, make_parser
from lit_llm.config.ranges import null_problems, number_problems, restore_whole_numbers
from lit_llm.config.spelling import refuse_groups_without_keys
from lit_llm.config.warmup import settle_warmup, take_warmup
from lit_llm.core.errors import UserError, noting, report
from lit_llm.core.yaml_reading import InvalidYaml, dump_yaml, read_yaml, refusal
from lit_llm.runs.init_from import InitialWeights

_BASES: dict[str, type] = {
    ARCHITECTURE: Module,
    "trainer.logger": Logger,
    "trainer.callbacks": Callback,
    "trainer.callbacks+": Callback,
}
"""Other keys than groups that name classes, with the class that each must extend."""


@dataclass
class Recipe:
    """A parsed recipe.

    Attributes:
        config: every setting, with the defaults of the chosen classes.
        given: dotted keys that a recipe file or a flag sets, without `init_args`.
        problems: one sentence per mistake. `config` is then made of the other settings.
        notes: what to tell if nothing is wrong, such as the arguments that another class drops.
        warmup: the share or the tokens from which `schedule.warmup_steps` follows. None: it is given, or the default.
        initial: the weights that `init_from` names. `resolve.read_recipe` finds them.
        initial_problems: why they cannot be used. They do not matter if a run is resumed.
    """

    command: Command
    arguments: Arguments
    parser: RecipeParser
    config: Namespace
    given: set[str]
    problems: list[str]
    notes: list[str]
    warmup: Assignment | None = None
    initial: InitialWeights | None = None
    initial_problems: list[str] = field(default_factory=list)

    @property
    def describes_model(self) -> bool:
        """Whether the recipe itself says what the model is, so that it can be planned without the weights of `init_from`."""
        return {"model.n_layer", "model.n_embd"} <= self.given

    def as_yaml(self, *, without: Collection[str] = ()) -> str:
        """Every setting, as YAML that runs as it is.

        An architecture of one's own has few settings of `model`. For a class of another package in `trainer`, only given
        arguments are written: its defaults differ between versions, and some cannot be written.

        Args:
            without: keys that are left out.
        """
        config = self.config.clone()
        for key in without:
            config.pop(key, None)
        if config.get(ARCHITECTURE) is not None:
            config.model = Namespace({name: config.model[name] for name in OF_ARCHITECTURES})
        for key in _TRAINER_CLASSES:
            given = self._given_arguments(f"trainer.{key}")
            entries = config.trainer.get(key)
            for entry in entries if isinstance(entries, list) else [entries]:
                if isinstance(entry, Namespace) and not str(entry.get("class_path")).startswith("lit_llm."):
                    arguments = entry.get("init_args") or Namespace()
                    entry.init_args = Namespace({name: arguments[name] for name in vars(arguments) if name in given})
        return self.parser.dump(config, skip_unset=False, skip_validation=True)

    def _given_arguments(self, key: str) -> set[str]:
        """Names of the arguments that are given to the class, or the list of classes, of a key."""
        found = {each.removeprefix(f"{key}.").partition(".")[0] for each in self.given if each.startswith(f"{key}.")}
        entries: list[Any] = [a.value for a in self.arguments.assignments if a.key.removesuffix("+") == key]
        while entries:
            entry = entries.pop()
            if isinstance(entry, str) and entry.lstrip().startswith("["):
                entry = read_yaml(entry)  # a list as a flag
            if isinstance(entry, list):
                entries += entry
            elif isinstance(entry, dict):
                found |= (entry.get("init_args") or {}).keys()
        return found

    def settings(self) -> dict[str, Any]:
        """Every setting by its key: plain values."""
        return dict(leaves(read_yaml(self.as_yaml())))

    def raise_problems(self) -> None:
        """Print the notes, unless there are problems.

        Raises:
            UserError: There are problems, or some have been printed already.
        """
        if self.problems or self.arguments.reported:
            raise UserError("\n".join(self.problems))
        report("\n".join(self.notes), kind="note")


_TRAINER_CLASSES = ("logger", "callbacks", "plugins", "profiler", "strategy")
"""Settings of the Trainer that take classes of any package."""


def parse(command: Command, arguments: Arguments | list[str], defaults: dict[str, Any] | None = None) -> Recipe:
    """Parse the arguments of a command. Mistakes in values are collected in `problems`.

    Args:
        defaults: by dotted key, instead of those of `groups`.

    Raises:
        UserError: A recipe file cannot be read, or the mistake cannot be assigned to one value.
    """
    if isinstance(arguments, list):
        arguments = read(arguments)
    if command in ("validate", "test"):  # they log nothing: the package of a logger need not be here
        of_loggers = [a for a in arguments.assignments if a.source != FLAGS and a.key.startswith("trainer.logger")]
        arguments = arguments.without(of_loggers)
    arguments, problems = refuse_groups_without_keys(arguments)
    arguments, shapes = refuse_wrong_shapes(arguments)
    parser = make_parser(command, defaults)
    arguments, dropped = drop_arguments_of_other_classes(arguments)
    arguments, warmup, of_warmup = take_warmup(arguments)
    optimizers = [a.value for a in arguments.assignments if a.key == "optimizer" and a.value not in ({}, "{}")]
    arguments, other_ends = _without_earlier_ends(arguments)
    arguments, missing = _without_incomplete_classes(_with_class_paths(arguments))
    problems += [*shapes, *of_warmup, *arguments.problems, *map(needs_value, arguments.bare), *missing]

    tried: dict[tuple[str, ...], Namespace | Exception] = {}

    def parse_words(words: list[str]) -> Namespace:
        if tuple(words) not in tried:  # mistakes are searched for by parsing parts, some of them again
            try:
                tried[tuple(words)] = parser.parse_args(with_empty_sources(words))
            except Exception as error:
                tried[tuple(words)] = error
        if isinstance(result := tried[tuple(words)], Exception):
            raise result
        return result

    try:
        config = parse_words(arguments.words())
    except Exception as error:
        found, accepted = explain(arguments, parse_words)
        config = parse_words(accepted)  # so that mistakes of other kinds are found too
        found += [
            f"{a.key} is {a.value!r}, but must be text: put it in quotes {a.where}"
            for a in _numbers_as_text(arguments, config, parse_words)
            if not any(problem.startswith(f"{a.key} is ") for problem in found)
        ]
        if not found:
            raise UserError(reason(str(error))) from None
        problems += found
    config.pop("config", None)
    problems = problems or _ambiguous_flags(arguments, config)
    given = {assignment.key for assignment in arguments.assignments}
    restore_whole_numbers(config, arguments)
    restore_defaults(config, parser.get_defaults(), given)
    notes = [*dropped, *other_ends]
    if command == "fit" and not (problems or null_problems(command, config, arguments) or number_problems(config, given)):
        notes += fill_adamw(config, given) if optimizers[-1:] == ["AdamW"] else []
        with noting(problems):
            notes += settle_warmup(warmup, config) if warmup is not None else []
    return Recipe(command, arguments, parser, config, given, problems, notes, warmup)


_ENDS = ("trainer.max_steps", "trainer.max_epochs")
"""Where a run ends: at the first of those that one source sets."""


def _without_earlier_ends(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """The arguments without limits that a later source replaces by one of the other kind, and a sentence for each.

    So `--trainer.max_epochs` counts, and not a recipe's `max_steps`.
    """
    ends = [a for a in arguments.assignments if a.key in _ENDS and a.value not in (None, -1, "null", "-1")]
    dropped = [a for a in ends if a.key != ends[-1].key]
    if any(a.source == ends[-1].source for a in dropped):  # a source that sets both means both
        return arguments, []
    notes = [
        f"{a.key} {a.value} of {a.origin} is replaced by {ends[-1].key} {ends[-1].value} {ends[-1].where}" for a in dropped
    ]
    return (arguments.without(dropped) if dropped else arguments), notes


def _with_class_paths(arguments: Arguments) -> Arguments:
    """The arguments with the paths of classes whose short names others have (`class_path`)."""

    def chosen(group: str, value: Any) -> Any:
        if isinstance(value, dict) and "class_path" in value:
            return {**value, "class_path": class_path(group, value["class_path"])}
        return class_path(group, value)

    return replace(
        arguments,
        items=[
            replace(item, value=class_path(plain_key(item.key), item.value))
            if isinstance(item, Flag)
            else replace(item, content={group: chosen(group, value) for group, value in item.content.items()})
            for item in arguments.items
        ],
    )


def _without_incomplete_classes(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """The arguments without those of classes that lack a required argument, and one sentence for each such class."""
    problems, dropped = [], []
    for group in (*CLASSES, "data.tokenizer", *_BASES):
        key = group.removesuffix("+")
        own = [a for a in arguments.assignments if a.key == group or a.key.startswith(f"{key}.")]
        named = [a.value for a in own if a.key == group and isinstance(a.value, (str, list, NoneType)) and a.value != "{}"]
        chosen = named[-1] if named else default_class(group)
        for path, inside in _class_entries(chosen) if own else []:
            cls: Any = find_class(group, path)
            if cls is None or not (issubclass(cls, _BASES[group]) if group in _BASES else cls in known_classes(group).values()):
                continue
            given = {a.key.removeprefix(f"{key}.").partition(".")[0] for a in own} | inside
            if group in CLASSES and cls is find_class(group, CLASSES[group].default) and not {None, "null"} & set(named):
                given |= (CLASSES[group].arguments or {}).keys()
            given |= {"params"} if group not in _BASES else {"vocab_size"} if group == ARCHITECTURE else set()
            required = [name for name, p in all_arguments(cls).items() if p.default is p.empty]
            if found := [name for name in required if name not in given]:
                flags = ", ".join(f"--{key}.{name}" for name in found) if path == chosen else f"--{group}"
                problems.append(f"{key} is {cls.__name__}, which needs {' and '.join(found)} ({flags})")
                dropped += own
    return (arguments.without(dropped) if dropped else arguments), problems


def _class_entries(value: Any) -> list[tuple[Any, set[str]]]:
    """The classes that a value names, alone or in a list, each with the names of the arguments beside it."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = read_yaml(value)
        except InvalidYaml:
            return []  # the parser reports it
    found: list[tuple[Any, set[str]]] = []
    for entry in value if isinstance(value, list) else [value]:
        path, inside = (entry.get("class_path"), entry.get("init_args")) if isinstance(entry, dict) else (entry, None)
        found.append((path, set(inside) if isinstance(inside, dict) else set()))  # the parser reports another type
    return found


def _numbers_as_text(
    arguments: Arguments, config: Namespace, parse_words: Callable[[list[str]], Namespace]
) -> list[Assignment]:
    """Values of recipe files that are refused because they must be text. As flags, the same characters are text."""
    values = dict(leaves(config.as_dict()))

    def is_refused(assignment: Assignment) -> bool:  # trainer.devices, for example, takes numbers and text
        tree = assignment.value
        for name in reversed(assignment.key.split(".")):
            tree = {name: tree}
        try:
            parse_words([f"--config={dump_yaml(tree)}"])
        except Exception:
            return True
        return False

    return [
        a
        for a in arguments.assignments
        if a.source != FLAGS
        and isinstance(a.value, (bool, int, float, list))
        and isinstance(values.get(a.key), str)
        and is_refused(a)
    ]


def _ambiguous_flags(arguments: Arguments, config: Namespace) -> list[str]:
    """Flags whose text became a number or bool, although the same text in a recipe file is refused."""
    values = dict(leaves(config.as_dict()))
    return [
        f"{a.key} is {a.value[:20]}, which {why} (--{a.key})"
        for a in arguments.assignments
        if a.source == FLAGS
        and isinstance(a.value, str)
        and isinstance(values.get(a.key), (bool, int, float))
        and (why := refusal(a.value.strip()))
    ]

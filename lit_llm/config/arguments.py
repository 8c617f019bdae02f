"""Command-line arguments, read in one place: flags, recipe files with their bases, and the values they assign. No torch.

A flag is written `--key value` or `--key=value`, with dashes or underscores. A later file overrides an earlier one. Flags
override files, wherever they stand, and a later flag overrides an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_llm.config import dial
from lit_llm.config.groups import OPTIONS
from lit_llm.config.recipe_files import content_of, find_recipe, with_base
from lit_llm.core.errors import UserError, not_utf8
from lit_llm.core.yaml_reading import InvalidYaml, NotYaml, read_yaml
from lit_llm.runs.run_folder import CONFIG, config_of, expanded

COMMAND_LINE = "the command line"
FLAGS = -1
"""The `source` of every flag."""
HELP = ("help", "h")
PRINT_CONFIG = "print_config"
_WITHOUT_VALUE = (*HELP, PRINT_CONFIG)
_SWITCHES = (PRINT_CONFIG, *(option.name for option in OPTIONS if option.type is bool))
"""Flags for which `--x` means `--x true`."""


@dataclass(frozen=True)
class Flag:
    """Record of a flag: its key, without dashes, and its value as text; None for a flag that needs no value, such as --help."""

    key: str
    value: str | None


@dataclass(frozen=True)
class RecipeFile:
    """Record of a recipe file: its path, as messages name it, and its settings as nested dicts, without the key `base`."""

    path: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Assignment:
    """Record of one setting that a recipe file or a flag gives: its key, its value, and where it was given.

    Attributes:
        key: dotted key without `class_path` and `init_args`: the name of the setting's flag.
        origin: the recipe file, or `COMMAND_LINE`.
        source: index of the recipe file in `Arguments.items`; `FLAGS` for every flag.
    """

    key: str
    value: Any
    origin: str
    source: int = FLAGS

    @property
    def where(self) -> str:
        """The end of a message about the setting: its flag and its origin, in brackets."""
        return f"(--{self.key}, in {self.origin})"


@dataclass(frozen=True)
class Arguments:
    """Record of the arguments of a command that takes a recipe, as `read` returns them.

    Attributes:
        items: recipe files and flags, in the order in which they apply. The base of a file comes right before the file.
        config_files: the recipe files that were named, without bases. The run folder is named after them.
        problems: one sentence for each word that cannot be understood, and after `spelling.check` for each unknown key.
        bare: keys of flags that need a value and were given without one.
    """

    items: list[RecipeFile | Flag]
    config_files: list[str]
    problems: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)

    @property
    def assignments(self) -> list[Assignment]:
        """Every setting that `items` give, in the order in which they apply, also settings that later ones override."""
        return [assignment for i, item in enumerate(self.items) for assignment in _assignments_of(item, i)]

    def value_of(self, key: str) -> Any:
        """The value that the last recipe file or flag with the dotted key `key` gives; None if none gives this key."""
        return next((a.value for a in reversed(self.assignments) if a.key == key), None)

    def asks_for(self, *keys: str) -> Flag | None:
        """The first flag in `items` whose key is one of `keys`, as for `--help`; None if there is no such flag."""
        return next((item for item in self.items if isinstance(item, Flag) and item.key in keys), None)

    def without(self, dropped: list[Assignment]) -> Arguments:
        """A copy without the settings in `dropped`. A flag that gives one of these settings is left out with all it gives."""
        items: list[RecipeFile | Flag] = []
        for i, item in enumerate(self.items):
            if isinstance(item, RecipeFile):
                keys = {a.key for a in dropped if a.source == i}
                items.append(RecipeFile(item.path, pruned(item.content, keys)) if keys else item)
            elif not any(a in dropped for a in _assignments_of(item)):
                items.append(item)
        return replace(self, items=items)


def _assignments_of(item: RecipeFile | Flag, position: int = FLAGS) -> list[Assignment]:
    if isinstance(item, RecipeFile):
        return [Assignment(key, value, item.path, position) for key, value in leaves(item.content)]
    if item.key in _WITHOUT_VALUE or item.value is None:
        return []
    key = plain_key(item.key)
    value = _nested(item.value)
    if isinstance(value, dict) and value:
        return [Assignment(k or key, v, COMMAND_LINE) for k, v in leaves(value, f"{key}.")]
    return [Assignment(key, item.value, COMMAND_LINE)]


def _nested(text: str) -> Any:
    """Return the dict or list that `text`, the value of a flag, means in YAML; `text` itself if it means neither."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return flag_value(text)
    except NotYaml:
        return text


def flag_value(text: str) -> Any:
    """Return what `text`, the value of a flag or the content of a recipe file, means in YAML. `{a, b}` and `a:` stay text.

    Raises:
        InvalidYaml: The text is no YAML, or breaks a further rule, such as that a dict has each key once.
    """
    value = read_yaml(text)
    if isinstance(value, dict) and text.strip(" {}").replace(" ", "").rstrip(":").split(",") == list(value):
        return text  # `{a, b}` and `a:` are dicts of nulls in YAML, but a flag means text by them
    return value


def as_list(value: Any) -> list[Any]:
    """Return a list: `value` or the list that its text means in YAML; [] for null; [value] for any other value."""
    value = _nested(value) if isinstance(value, str) else value
    return [] if value in (None, "null") else value if isinstance(value, list) else [value]


def plain_key(key: str) -> str:
    """Return a dotted key without `init_args` and a final `class_path`: `schedule.init_args.shape` gives `schedule.shape`."""
    return key.replace(".init_args", "").removesuffix(".class_path")


def leaves(
    tree: dict[str, Any], prefix: str = "", is_inner: Callable[[dict[str, Any]], bool] = bool
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf of a nested dict, without `class_path` and `init_args` in the key.

    A class has the key of its dict, and comes before its arguments.

    Args:
        prefix: the beginning of every key.
        is_inner: function that says whether a dict is taken apart; otherwise it is a leaf. Default: unless the dict is empty.
    """
    for name, value in sorted(tree.items(), key=lambda item: item[0] != "class_path"):
        if name == "class_path":
            yield prefix.rstrip("."), value
        elif name == "init_args" and isinstance(value, dict):
            yield from leaves(value, prefix, is_inner)
        elif isinstance(value, dict) and is_inner(value):
            yield from leaves(value, f"{prefix}{name}.", is_inner)
        else:
            yield f"{prefix}{name}", value


def pruned(tree: dict[str, Any], keys: set[str], prefix: str = "") -> dict[str, Any]:
    """Return a copy of `tree` without the leaves with the dotted `keys` (as in `leaves`) and without emptied dicts."""
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        key = prefix.rstrip(".") if name == "class_path" else f"{prefix}{name}"
        if isinstance(value, dict) and value:
            below = prefix if name == "init_args" else f"{key}."
            if rest := pruned(value, keys, below):
                kept[name] = rest
        elif key not in keys:
            kept[name] = value
    return kept


# -- reading ------------------------------------------------------------------------------------------------------------


def underscored(words: list[str]) -> list[str]:
    """Return `words` with underscores for dashes in names of flags: `--check_against` for `--check-against`."""
    changed = []
    for word in words:
        flag, equals, value = word.partition("=")
        changed.append("--" + flag[2:].replace("-", "_") + equals + value if word.startswith("--") else word)
    return changed


def refuse_other_encodings(words: list[str]) -> None:
    """Raise a UserError for the first word of a command line that is not UTF-8 text, if there is one."""
    for before, word in zip(["", *words], words, strict=False):
        if (problem := not_utf8(word)) is not None:
            raise UserError(problem + (f" ({before})" if is_flag(before) else ""))


def read(words: list[str]) -> Arguments:
    """Return the arguments of a command that takes a recipe, from the words of its command line. Recipe files are read.

    `--run DIR` means `--config DIR/config.yaml --run_dir DIR`. `--config NAME` takes a file or the name of a shipped recipe.

    Raises:
        UserError: A recipe file, a run folder or the value of a flag cannot be read, or a depth is wrong; a line per mistake.
    """
    flags, problems, bare = read_flags(underscored(words))
    items: list[RecipeFile | Flag] = []
    named: list[str] = []
    unreadable: list[str] = []
    for flag in flags:
        try:
            if flag.key in ("config", "c") and flag.value is not None:
                file = find_recipe(flag.value)
                named.append(str(file))
                items += _with_base(file)
            elif flag.key == "run" and flag.value is not None:
                run = expanded(flag.value)
                file = config_of(run)
                named.append(str(file))
                items += [*_with_base(file), Flag("run_dir", str(run)), *own_tokenizer(run)]
            elif flag.key == PRINT_CONFIG:
                if flag.value not in ("true", "false"):
                    raise UserError(f"--{PRINT_CONFIG} is {flag.value!r}, it must be true or false")
                items += [Flag(PRINT_CONFIG, None)] * (flag.value == "true")
            elif flag.key == "base":
                raise UserError("base is a key of recipe files. Give the base first: --config BASE --config RECIPE (--base)")
            else:
                items.append(flag)
                _nested(flag.value or "")
        except InvalidYaml as error:
            unreadable.append(f"the value of {flag.key} {error} (--{flag.key})")
        except UserError as error:
            unreadable += str(error).splitlines()
    items.sort(key=lambda item: isinstance(item, Flag))  # flags override files
    try:
        items = _with_depth(items)
    except UserError as error:
        unreadable.append(str(error))
    if unreadable or dial.DEPTH in bare:
        raise UserError("\n".join([*problems, *map(needs_value, bare), *unreadable]))
    return Arguments(items, named, problems, bare)


def _with_depth(items: list[RecipeFile | Flag]) -> list[RecipeFile | Flag]:
    """Return `items` without the key `depth`, and with the settings that `dial.settings_of` computes from the last depth.

    These settings stand right after the first recipe file with a depth, so that later files and flags override them.

    Raises:
        UserError: A depth is out of range, or a flag gives a depth although no recipe file has one.
    """
    depth: int | None = None
    place = 0
    kept: list[RecipeFile | Flag] = []
    for item in items:
        if isinstance(item, RecipeFile) and dial.DEPTH in item.content:
            content = {key: value for key, value in item.content.items() if key != dial.DEPTH}
            kept.append(RecipeFile(item.path, content))
            place = place or len(kept)
            depth = dial.depth_of(item.content[dial.DEPTH], f"(--depth, in {item.path})")
        elif isinstance(item, Flag) and item.key == dial.DEPTH:
            if not place:
                raise UserError("--depth needs a recipe whose sizes follow from it: --config dial (--depth)")
            depth = dial.depth_of(item.value, "(--depth)")
        else:
            kept.append(item)
    if depth is None:
        return items
    origin = kept[place - 1]
    assert isinstance(origin, RecipeFile)
    return [*kept[:place], RecipeFile(f"{origin.path}, depth {depth}", dial.settings_of(depth)), *kept[place:]]


def is_flag(word: str) -> bool:
    """Whether a word is a flag: -c, -h, or two dashes and a letter. Other words, such as -1e-3, -inf or -name, are values."""
    return re.match(r"--[A-Za-z]|-[ch](=|$)", word) is not None


def needs_value(key: str) -> str:
    """Return the message about a flag that needs a value and was given without one."""
    return f"--{key} needs a value, like --{key} VALUE"


def read_flags(words: list[str]) -> tuple[list[Flag], list[str], list[str]]:
    """Return (flags, a sentence for each word that is neither flag nor value, keys of flags without the value they need)."""
    flags: list[Flag] = []
    problems: list[str] = []
    bare: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not is_flag(word):
            rule = (
                'write values after their flag, like --model.n_layer 4, and several as a list, like --data.paths \'["A", "B"]\''
            )
            if word.startswith("-"):
                rule = "a flag starts with two dashes, like --model.n_layer 4"
            problems.append(f"unexpected argument '{word}'; {rule}")
            continue
        key, equals, value = word.lstrip("-").partition("=")
        if equals:
            flags.append(Flag(key, value))
        elif position < len(words) and not is_flag(words[position]):
            flags.append(Flag(key, words[position]))
            position += 1
        elif key in HELP or key.endswith(".help"):
            flags.append(Flag(key, None))
        elif key in _SWITCHES:
            flags.append(Flag(key, "true"))
        else:
            bare.append(key)
    return flags, problems, bare


def _with_base(path: Path) -> list[RecipeFile]:
    files = [RecipeFile(str(file), content) for file, content in with_base(path)]
    for file in files:
        keys = [key for key, _ in leaves(file.content)]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise UserError(f"{file.path} sets {twice[0]} twice, in two ways of writing it: keep one (--config)")
    return files


def own_tokenizer(run: Path) -> list[Flag]:
    """Return [a flag for the tokenizer's copy in the run folder] if the file that its config.yaml names is gone; else []."""
    content = content_of(run / CONFIG)
    try:
        path = content["data"]["init_args"]["tokenizer"]["init_args"]["path"]
    except (KeyError, TypeError):
        return []  # a tokenizer without a file
    if not isinstance(path, str) or Path(path).exists():
        return []
    from lit_llm.tokenizers import TOKENIZER_FILE  # takes 0.1 s

    return [Flag("data.tokenizer.path", str(run / TOKENIZER_FILE))] if (run / TOKENIZER_FILE).exists() else []

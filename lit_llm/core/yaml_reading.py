"""Reads YAML as a tree of plain values, with one-sentence errors, and writes YAML. Imports no torch.

Values are those of YAML 1.2, with binary numbers and underscores: `1e-3`, `.5`, `0x10` and `1_000` are numbers, `.inf` and
`.nan` are floats; `no`, `12:30` and a date are text. PyYAML alone reads YAML 1.1, where `1e-3` is text and `no` is false.
Tags and repeated keys are refused.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from lit_llm.core.errors import UserError

_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9_]{0,99}|0x[0-9a-fA-F][0-9a-fA-F_]*|0b[01][01_]*)",
    "float": r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": "<<",
}
"""{tag of YAML: regular expression of the unquoted texts that it means}; the first match counts. Any other text is text."""


class InvalidYaml(UserError):
    """Raised for a mistake in YAML text. The message follows the text's name in a sentence: "is not valid YAML at line 3"."""


class NotYaml(InvalidYaml):
    """Raised for a text that breaks YAML's syntax, and so may be ordinary text that was never meant as YAML."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader with the values of `_SCALARS`, which refuses a key that a dict has already."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise InvalidYaml(f"sets the key {name} at line {lines[name]} and again at line {line}: keep one")
            lines[name] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes a text which `read_yaml`, or a reader of YAML 1.1, would read as another value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    escaped = not text.isprintable() and "\n" not in text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if escaped else None)


_Dumper.add_representer(str, _represent_str)
for tag, pattern in _SCALARS.items():
    for each in (_Loader, _Dumper):
        each.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"({pattern})$"), None)


def read_yaml(text: str) -> Any:
    """The tree of dicts, lists and scalars that a YAML text describes; None for an empty text.

    Raises:
        InvalidYaml: The text is not YAML, or has a tag or a repeated key.
    """
    try:
        return yaml.load(text.removeprefix("\ufeff"), Loader=_Loader)  # the byte order mark of some editors
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)  # without a mark: unprintable
        kind = InvalidYaml if isinstance(error, yaml.constructor.ConstructorError) else NotYaml
        raise kind(f"is not valid YAML at line {mark.line + 1}: {problem}" if mark else "is not valid YAML") from None
    except RecursionError:
        raise InvalidYaml("nests values too deeply") from None


def read_yaml_file(path: Path | str) -> Any:
    """The tree of dicts, lists and scalars that a YAML file in UTF-8 describes; None for an empty file.

    Raises:
        InvalidYaml: The file is not UTF-8 or not YAML, or has a tag or a repeated key.
        OSError: The file cannot be read.
    """
    content = Path(path).read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidYaml(f"is not UTF-8 text: byte {content[error.start]:#04x} at line {line}") from None
    return read_yaml(text)


def dump_yaml(tree: Any) -> str:
    """Write a tree of dicts, lists and scalars as YAML text, from which `read_yaml` gets the same tree."""
    return yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def comment(text: str) -> str:
    """The text as a YAML comment of one line: "?" replaces unprintable characters."""
    return f"# {''.join(c if c.isprintable() else '?' for c in ' '.join(text.splitlines()))}\n"


def as_flag(value: Any) -> str:
    """A value of a YAML tree, written as the text that follows its flag on a command line: JSON, but strings as they are."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value if isinstance(value, str) else json.dumps(value, default=str)

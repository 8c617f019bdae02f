"""Reads YAML as a tree of plain values, with one-sentence errors, and writes YAML. Imports no torch.

`1e-3`, `.5`, `0x10` and `1_000` are numbers, `.inf` and `.nan` are floats, and a date is text. The text of a value is refused
where YAML 1.1 and 1.2 disagree about it: `no`, `on`, `010`, `12:30`.
Anchors, aliases and merge keys (`<<`) work. Tags, several documents and repeated keys are refused.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from lit_llm.core.errors import UserError

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,99}|0x[0-9a-fA-F][0-9a-fA-F_]*|0b[01][01_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_AMBIGUOUS_BOOL = re.compile(r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_AMBIGUOUS_INT = re.compile(r"[-+]?(0[0-9_]+|0o[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


class InvalidYaml(UserError):
    """Raised for a mistake in YAML text. The message follows the text's name in a sentence: "is not valid YAML at line 3"."""


class NotYaml(InvalidYaml):
    """Raised for a text that breaks YAML's syntax, and so may be ordinary text that was never meant as YAML."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that composes nodes without interpreting scalars; `_scalar` interprets them."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


def read_yaml(text: str) -> Any:
    """The tree of dicts, lists and scalars that a YAML text describes; None for an empty text. Aliases become copies.

    Raises:
        InvalidYaml: The text is not YAML, or uses YAML that this module does not read.
    """
    try:
        node = yaml.compose(text.removeprefix("\ufeff"), Loader=_Loader)  # the byte order mark of some editors
        return None if node is None else _value(node)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)  # without a mark: unprintable
        raise NotYaml(f"is not valid YAML at line {mark.line + 1}: {problem}" if mark else "is not valid YAML") from None
    except RecursionError:
        raise InvalidYaml("nests values too deeply, or has an alias inside its own anchor") from None


def read_yaml_file(path: Path | str) -> Any:
    """The tree of dicts, lists and scalars that a YAML file in UTF-8 describes; None for an empty file.

    Raises:
        InvalidYaml: The file is not UTF-8 or not YAML, or uses YAML that this module does not read.
        OSError: The file cannot be read.
    """
    content = Path(path).read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidYaml(f"is not UTF-8 text: byte {content[error.start]:#04x} at line {line}") from None
    return read_yaml(text)


def refusal(text: str) -> str | None:
    """Why an unquoted text is refused as a value: YAML 1.1 and 1.2 disagree about it. The end of a sentence; None: allowed."""
    if _AMBIGUOUS_BOOL.fullmatch(text):
        return "means true or false in YAML 1.1 and text in YAML 1.2: write true or false, or quotes around it"
    if _AMBIGUOUS_INT.fullmatch(text):
        return "means different numbers in YAML 1.1 and 1.2: write a decimal number, or quotes around it"
    return None


def _value_of(text: str) -> Any:
    """The value of an unquoted YAML scalar that `refusal` allows: None, a bool, a number, or the text itself."""
    if _NULL.fullmatch(text):
        return None
    if match := _BOOL.fullmatch(text):
        return match[1] is not None
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    if _INT.fullmatch(text):
        return int(text.replace("_", ""), 0)
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text


def _value(node: yaml.Node) -> Any:
    """The tree of dicts, lists and scalars of a YAML node and of all nodes below it."""
    if node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
        _refuse(node, f"has the tag {node.tag[:60]}", ": tags are not allowed")
    if isinstance(node, yaml.SequenceNode):
        return [_value(each) for each in node.value]
    return _mapping(node) if isinstance(node, yaml.MappingNode) else _scalar(node)


def _scalar(node: Any) -> Any:
    text: str = node.value
    if node.style:
        return text  # in quotes, or a block
    if reason := refusal(text):
        _refuse(node, f"has the value {text[:20]}{'…' * (len(text) > 20)}", f", which {reason}")
    return _value_of(text)


def _mapping(node: yaml.MappingNode) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    lines: dict[str, int] = {}
    merged: dict[Any, Any] = {}
    for of_key, of_value in node.value:
        key, value = _value(of_key), _value(of_value)
        if isinstance(key, (bool, float)) or not isinstance(key, (str, int)):
            shown = str(key)[:40] if isinstance(of_key, yaml.ScalarNode) else "that is a list or dict"
            _refuse(of_key, f"has the key {shown}", ": a key must be text or a whole number")
        line = of_key.start_mark.line + 1
        if str(key) in lines:
            raise InvalidYaml(f"sets the key {key} at line {lines[str(key)]} and again at line {line}: keep one")
        lines[str(key)] = line
        if key == "<<" and not of_key.style:
            for each in value if isinstance(value, list) else [value]:
                if not isinstance(each, dict):
                    _refuse(of_key, "merges a value with <<", ", but only mappings can be merged")
                merged = each | merged
        else:
            mapping[key] = value
    return {**merged, **mapping} if merged else mapping


def _refuse(node: yaml.Node, what: str, rule: str = "") -> NoReturn:
    raise InvalidYaml(f"{what} at line {node.start_mark.line + 1}{rule}")


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text that `read_yaml` would not read as the same text without quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = refusal(text) is None and _value_of(text) == text
    style = '"' if not text.isprintable() and "\n" not in text else None if plain else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)


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

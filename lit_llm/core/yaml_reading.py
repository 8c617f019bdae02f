"""YAML, read and written in one place, with limits: a file from anywhere is a tree of plain values, or one sentence. No torch.

`1e-3`, `.5`, `0x10` and `1_000` are numbers, `.inf` and `.nan` are floats, and a date is text. The text of a value is refused
where YAML 1.1 and 1.2 disagree about it: `no`, `on`, `010`, `12:30`.
Anchors, aliases and merge keys (`<<`) work. Tags, several documents and repeated keys are refused.

The tree is built from PyYAML's events. So no object of another type can be constructed, and every limit holds while reading.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lit_llm.core.disk import UnusableFile, read_ordinary
from lit_llm.core.errors import UserError

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_DIGITS = 100
_MERGE = "<<"

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F][0-9a-fA-F_]*|0b[01][01_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_AMBIGUOUS_BOOL = re.compile(r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_AMBIGUOUS_INT = re.compile(r"[-+]?(0[0-9_]+|0o[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
_ANY_DIGITS = re.compile(r"[-+]?[\d_]*(\.[\d_]*)?([eE][-+]?\d+)?")  # of any script: int() and float() read them all
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")

_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class InvalidYaml(UserError):
    """What is wrong with a text, as the end of a sentence that begins with its name: "is not valid YAML at line 3"."""


class NotYaml(InvalidYaml):
    """The text breaks YAML's syntax: it may be ordinary text."""


def read_yaml(text: str) -> Any:
    """The tree of dicts, lists and scalars that a text describes; None if it is empty. Aliases become copies.

    Raises:
        InvalidYaml: It is not YAML, or beyond what this module reads.
    """
    if len(text) > MAX_BYTES:
        raise InvalidYaml(f"is longer than {MAX_BYTES:,} characters")
    text = text.removeprefix("\ufeff")  # the byte order mark of some editors
    if found := _CONTROL.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise InvalidYaml(f"has the control character U+{ord(found[0]):04X} at line {line}: remove it")
    try:
        return _Reader(text).document()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        if "nesting depth" in str(getattr(error, "problem", "")):  # PyYAML 6.0.4 reads ahead and stops at 1,000 levels
            raise InvalidYaml(f"nests values more than {MAX_DEPTH} levels deep{where}") from None
        raise NotYaml(f"is not valid YAML{where}") from None


def read_yaml_file(path: Path | str) -> Any:
    """The same for a file of UTF-8 text.

    Raises:
        InvalidYaml: As `read_yaml`, or it is not an ordinary file.
        OSError: It cannot be read.
    """
    try:
        content = read_ordinary(path, MAX_BYTES)
    except UnusableFile as error:
        raise InvalidYaml(str(error.strerror).removeprefix("it ")) from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidYaml(f"is not UTF-8 text: byte {content[error.start]:#04x} at line {line}") from None
    return read_yaml(text)


def refusal(text: str) -> str | None:
    """Why an unquoted text is refused as a value, as the end of a sentence; None if it is not."""
    if _AMBIGUOUS_BOOL.fullmatch(text):
        return "means true or false in YAML 1.1 and text in YAML 1.2: write true or false, or quotes around it"
    if _AMBIGUOUS_INT.fullmatch(text):
        return "means different numbers in YAML 1.1 and 1.2: write a decimal number, or quotes around it"
    if not text.isascii() and _ANY_DIGITS.fullmatch(text):
        return "has digits of another script: write 0 to 9, or quotes around it"
    if len(text) > MAX_DIGITS and (_INT.fullmatch(text) or _FLOAT.fullmatch(text)):
        return f"has {len(text):,} digits, but a number may have {MAX_DIGITS}"
    return None


def _value_of(text: str) -> Any:
    """The value of an unquoted text that is not refused."""
    if _NULL.fullmatch(text):
        return None
    if found := _BOOL.fullmatch(text):
        return found[1] is not None
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    if _INT.fullmatch(text):
        return int(text.replace("_", ""), 0)
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text


@dataclass
class _Anchored:
    """The value of an anchor and how many values it has. `size` is 0 until the value is complete."""

    value: Any = None
    size: int = 0


class _Reader:
    """Builds the tree of one text from PyYAML's events."""

    def __init__(self, text: str) -> None:
        self._events: Iterator[Any] = yaml.parse(text, Loader=_Parser)
        self._anchors: dict[str, _Anchored] = {}
        self._values = 0

    def document(self) -> Any:
        value, documents = None, 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    _refuse(event, "has a second document", ": keep one")
                value = self._value(next(self._events), 0)
        return value

    def _value(self, event: Any, depth: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._copy_of_anchor(event)
        self._count(1, event)
        if depth > MAX_DEPTH:
            _refuse(event, f"nests values more than {MAX_DEPTH} levels deep")
        if event.tag is not None:
            _refuse(event, f"has the tag {event.tag[:60]}", ": tags are not allowed")
        before = self._values
        anchored = _Anchored()
        if event.anchor is not None:
            self._anchors[event.anchor] = anchored
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                value.append(self._value(item, depth + 1))
        else:
            value = self._mapping(depth)
        anchored.value, anchored.size = value, self._values - before + 1
        return value

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if "\0" in text:
            _refuse(event, "has the control character U+0000", ": remove it")
        if not event.implicit[0]:
            return text  # in quotes
        if reason := refusal(text):
            _refuse(event, f"has the value {text[:20]}{'…' * (len(text) > 20)}", f", which {reason}")
        return _value_of(text)

    def _mapping(self, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        lines: dict[str, int] = {}
        merged: dict[Any, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            if isinstance(key, (bool, float)) or not isinstance(key, (str, int)):
                shown = str(key)[:40] if isinstance(event, yaml.ScalarEvent) else "that is a list or dict"
                _refuse(event, f"has the key {shown}", ": a key must be text or a whole number")
            line = event.start_mark.line + 1
            if str(key) in lines:
                raise InvalidYaml(f"sets the key {key} at line {lines[str(key)]} and again at line {line}: keep one")
            lines[str(key)] = line
            value = self._value(next(self._events), depth + 1)
            if key == _MERGE and isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
                for each in value if isinstance(value, list) else [value]:
                    if not isinstance(each, dict):
                        _refuse(event, "merges a value with <<", ", but only mappings can be merged")
                    merged = each | merged
            else:
                found[key] = value
        return {**merged, **found} if merged else found

    def _copy_of_anchor(self, event: Any) -> Any:
        anchored = self._anchors.get(event.anchor)
        if anchored is None:
            _refuse(event, f"has the alias *{event.anchor[:40]}", ", but no anchor of that name before it")
        if not anchored.size:
            _refuse(event, f"has the alias *{event.anchor[:40]}", " inside its own anchor")
        self._count(anchored.size, event)
        return copy.deepcopy(anchored.value)

    def _count(self, values: int, event: Any) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            _refuse(event, f"has more than {MAX_VALUES:,} values", ", with each use of an alias counted")


def _refuse(event: Any, what: str, rule: str = "") -> NoReturn:
    raise InvalidYaml(f"{what} at line {event.start_mark.line + 1}{rule}")


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `read_yaml` would not read as the same text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = refusal(text) is None and _value_of(text) == text
    style = '"' if not text.isprintable() and "\n" not in text else None if plain else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)


def dump_yaml(tree: Any) -> str:
    """A tree of dicts, lists and scalars as text that `read_yaml` reads as the same tree."""
    return yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def comment(text: str) -> str:
    """A comment of one line, whatever names the text contains."""
    return f"# {_CONTROL.sub('?', ' '.join(text.splitlines()))}\n"


def as_flag(value: Any) -> str:
    """A value as it is written after a flag."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value if isinstance(value, str) else json.dumps(value, default=str)

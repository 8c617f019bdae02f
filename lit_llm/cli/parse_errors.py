"""Mistakes in a recipe or on the command line: all of them at once, each with the nearest right key.

jsonargparse stops at the first mistake and explains it in up to forty lines. When parsing fails, the assignments (leaves of the
--config files, and flags) are tried again on top of those that were fine, so each mistake is found, named and explained once.
That costs up to a parse per assignment, on the error path only.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from lit_llm.cli.recipe_files import shipped


@dataclass(frozen=True)
class Assignment:
    """One value given by the user: a leaf of a config file, or a flag."""

    key: str
    """Dotted, without class_path and init_args: what the flag for it is called."""
    value: Any
    origin: str
    """The config file it stands in, or "the command line"."""

    def as_flag(self) -> str:
        value = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"--{self.key}={value}"


def assignments_in(arguments: list[str]) -> tuple[list[Assignment], list[str]]:
    """Every assignment in command-line arguments, config files included, in order; and the files that cannot be read."""
    found: list[Assignment] = []
    problems: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if not argument.startswith("-"):
            problems.append(f"'{argument}' stands alone on the command line; a value follows its flag, like --model.n_layer 4")
            continue
        key, equals, value = argument.partition("=")
        if not equals:
            if position < len(arguments) and not re.match(r"--?[A-Za-z]", arguments[position]):
                value = arguments[position]
                position += 1
            else:
                problems.append(f"{key} is given without a value, like {key} VALUE")
                continue
        key = key.lstrip("-")
        if key in ("config", "c"):
            try:
                with open(value, encoding="utf-8") as file:
                    content = yaml.safe_load(file)
            except OSError as error:
                near = difflib.get_close_matches(Path(value).stem, [Path(name).stem for name in shipped()], n=1)
                hint = f"; did you mean {near[0]}?" if near else "; `python -m lit_llm recipes` lists those there are"
                problems.append(f"config file {value} cannot be read: {error.strerror}{hint} (--config)")
                continue
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                where = getattr(error, "problem_mark", None)
                line = f" at line {where.line + 1}" if where else ""
                problems.append(f"config file {value} is not valid YAML{line} (--config)")
                continue
            if not isinstance(content, dict):
                problems.append(f"config file {value} holds no settings, it should be `key: value` lines (--config)")
                continue
            found += [Assignment(k, v, value) for k, v in leaves(content)]
        else:
            found.append(Assignment(key, value, "the command line"))
    return found, problems


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested dict; a class comes before its arguments, which follow without `init_args`."""
    for name, value in sorted(tree.items(), key=lambda item: item[0] != "class_path"):
        if name == "class_path":
            yield prefix.rstrip("."), value
        elif name == "init_args" and isinstance(value, dict):
            yield from leaves(value, prefix)
        elif isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def explain(
    arguments: list[str],
    parse: Callable[[list[str]], Any],
    class_names: Callable[[str], list[str]],
    class_problem: Callable[[str, Any], str | None] = lambda key, value: None,
) -> tuple[list[str], list[str]]:
    """One sentence for each mistake in `arguments`, and the flags that remain without them.

    Args:
        parse: parses flags into a namespace; raises on a mistake.
        class_names: the known classes of a group, by the group's key; empty when it takes no class.
        class_problem: what is wrong with the class that a group names, by key and value, in a sentence; None: nothing that is
            known.
    """
    assignments, problems = assignments_in(arguments)
    accepted: list[str] = []

    def error_of(candidates: list[Assignment]) -> str | None:
        try:
            parse([*accepted, *(assignment.as_flag() for assignment in candidates)])
        except Exception as error:
            return str(error)
        return None

    def report(assignment: Assignment, error: str) -> None:
        if said := class_problem(assignment.key, assignment.value):
            problems.append(said)
            return
        known = [key for key, _ in leaves(_as_dict(parse(accepted)))]
        problems.append(_sentence(assignment, error, known, class_names(assignment.key)))

    rejected_classes: list[str] = []
    # A class may be valid only together with its required arguments, so what stands together is tried together first.
    for _, together in groupby(assignments, key=lambda a: (a.origin, a.key.partition(".")[0])):
        group = list(together)
        if error_of(group) is not None:
            for i, suspect in enumerate(group):
                others = group[:i] + group[i + 1 :]
                if len(others) > 0 and error_of(others) is None:
                    report(suspect, error_of([*others, suspect]) or "")
                    group = others
                    break
            else:
                fine: list[Assignment] = []
                for suspect in group:
                    if any(suspect.key.startswith(f"{rejected}.") for rejected in rejected_classes):
                        continue  # what belongs to a class that does not exist cannot be judged
                    error = error_of([*fine, suspect])
                    if error is None:
                        fine.append(suspect)
                    else:
                        report(suspect, error)
                        if class_names(suspect.key) or class_problem(suspect.key, suspect.value):
                            rejected_classes.append(suspect.key)
                group = fine
        accepted += [assignment.as_flag() for assignment in group]
    return problems, accepted


def reason(error: str) -> str:
    """What our own classes said, out of jsonargparse's account of everything it tried."""
    lines = [line.strip(" -.") for line in error.splitlines() if line.strip()]
    own = [line for line in lines if re.search(r"\(--[\w.]+\)", line)]
    noise = ("Expected a", "Does not validate", "Problem with given", "Subtypes:", "Errors:", "Given value", "Parser key")
    return (own or [line for line in lines if not line.startswith(noise)] or [" ".join(lines)])[0][:300]


def _as_dict(namespace: Any) -> dict[str, Any]:
    return namespace.as_dict() if hasattr(namespace, "as_dict") else dict(namespace)


def _sentence(assignment: Assignment, error: str, known: list[str], classes: list[str]) -> str:
    key, value = assignment.key, assignment.value
    where = f"(--{key}, in {assignment.origin})"
    unknown = "unrecognized arguments" in error or "is not accepted" in error or "is not expected" in error
    if unknown and key not in known:
        tail = key.rpartition(".")[2]
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        near = near or [k for k in known if k.rpartition(".")[2] == tail][:1]  # the right name in the wrong group
        near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown key {key}{hint} {where}"
    if classes and isinstance(value, str) and value.rpartition(".")[2] not in classes:
        near = difflib.get_close_matches(value.rpartition(".")[2], classes, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{key} is {value!r}, which is no class that can be used here{hint} (known: {', '.join(classes)}) {where}"
    expected = re.findall(r"Expected an? (.+?)\. Got value", error) or re.findall(r"Subtypes: \[(.+)\]$", error, re.M)
    if expected:
        kinds = re.sub(r"<class '([\w.]+)'>", r"\1", expected[0]).replace("NoneType", "null").replace("typing.", "")
        if choices := _choices(kinds):
            near = difflib.get_close_matches(str(value), choices, n=3, cutoff=0.5)
            nearest = f" (nearest: {', '.join(near)})" if near else ""
            return f"{key} is {value!r}, it must be one of {', '.join(choices)}{nearest} {where}"
        return f"{key} is {value!r}, it must be of type {kinds} {where}"
    return f"{key} is {value!r}: {reason(error)} {where}"


def _choices(kinds: str) -> list[str]:
    """The values of a type that is nothing but Literal[…] and null, each once; empty for any other type."""
    if re.sub(r"Literal\[[^\]]*\]|null|[,\s]", "", kinds):
        return []
    values = [str(value) for inner in re.findall(r"Literal\[([^\]]*)\]", kinds) for value in ast.literal_eval(f"[{inner}]")]
    return list(dict.fromkeys(values + ["null"] * ("null" in kinds))) if values else []

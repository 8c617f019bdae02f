"""Explains mistakes in recipes and flags: all of them at once, each with the nearest right key or value.

jsonargparse stops at the first mistake and explains it in up to forty lines. So when parsing fails, the assignments are tried
again on top of those that are right: all but those of the group that the message names, or half of them, …, at last one by one.

Only this module reads jsonargparse's messages and decides which exceptions of constructors are a user's mistake.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable
from itertools import groupby

from jsonargparse import Namespace

from lit_llm.config.arguments import Arguments, Assignment, leaves
from lit_llm.config.parser import known_classes
from lit_llm.config.spelling import short, unknown_key
from lit_llm.core.errors import UserError
from lit_llm.models.custom import class_problem


def explain(arguments: Arguments, parse: Callable[[list[str]], Namespace]) -> tuple[list[str], list[str]]:
    """One sentence for each mistake, and the flags that remain without the mistakes.

    Args:
        parse: parses flags into a namespace; raises on a mistake.
    """
    problems: list[tuple[int, str]] = []  # with the number of the assignment
    accepted: list[str] = []

    def error_of(candidates: list[Assignment]) -> str | None:
        try:
            parse([*accepted, *(assignment.as_flag() for assignment in candidates)])
        except Exception as error:
            return str(error)
        return None

    def report(assignment: Assignment, error: str) -> None:
        known = lambda: [key for key, _ in leaves(parse(accepted).as_dict())]  # noqa: E731
        problem = class_problem(assignment.key, assignment.value)
        problem = problem or _sentence(assignment, error, known, list(known_classes(assignment.key)))
        problems.append((arguments.assignments.index(assignment), problem))

    rejected_classes: list[str] = []

    def examine(groups: list[list[Assignment]]) -> None:
        """Accept what is right of assignments, whose groups are tried together."""
        group = [assignment for each in groups for assignment in each]
        if (error := error_of(group)) is None:
            accepted.extend(assignment.as_flag() for assignment in group)
        elif len(groups) > 1:
            culprit = re.match(r'(?:Parser key "|unrecognized arguments: --)(\w+)', error)
            suspects = [each for each in groups if culprit and _group(each[0]) == culprit[1]]
            if len(suspects) in (0, len(groups)):
                suspects = groups[len(groups) // 2 :]
            examine([each for each in groups if each not in suspects])
            examine(suspects)
        else:
            accepted.extend(assignment.as_flag() for assignment in right_of(group))

    def right_of(group: list[Assignment]) -> list[Assignment]:
        """Report the mistakes of one group."""
        for i, suspect in enumerate(group):
            others = group[:i] + group[i + 1 :]
            if others and error_of(others) is None:
                report(suspect, error_of([*others, suspect]) or "")
                return others
        fine: list[Assignment] = []
        for suspect in group:
            if any(suspect.key.startswith(f"{rejected}.") for rejected in rejected_classes):
                continue  # an argument of a class that does not exist cannot be checked
            error = error_of([*fine, suspect])
            below = [a for a in group if a.key.startswith(f"{suspect.key}.") and a not in fine]
            if error is None:
                fine.append(suspect)
            elif below and str(suspect.value).rpartition(".")[2] in known_classes(suspect.key):
                # The class is right, but one of the arguments that it requires is not.
                error = error_of([*fine, suspect, *below]) or error
                named = [a for a in below if a.key.rpartition(".")[2] in error]
                report((named or below)[0], error)
                rejected_classes.append(suspect.key)
            else:
                report(suspect, error)
                if known_classes(suspect.key) or class_problem(suspect.key, suspect.value):
                    rejected_classes.append(suspect.key)
        return fine

    # A class can be valid only together with its required arguments, so the assignments of one group are tried together first.
    examine([list(each) for _, each in groupby(arguments.assignments, key=lambda a: (a.origin, _group(a)))])
    return [problem for _, problem in sorted(problems)], accepted


def _group(assignment: Assignment) -> str:
    return assignment.key.partition(".")[0]


def reason(error: str) -> str:
    """The message of the class that was built, without what jsonargparse writes around it."""
    lines = [line.strip(" -.") for line in error.splitlines() if line.strip()]
    own = [line for line in lines if re.search(r"\(--[\w.]+\)", line)]
    noise = ("Expected a", "Does not validate", "Problem with given", "Subtypes:", "Errors:", "Given value", "Parser key")
    return (own or [line for line in lines if not line.startswith(noise)] or [" ".join(lines)])[0][:300]


def is_mistake(error: Exception) -> bool:
    """Whether an exception caught while an object of the recipe was built can be reported without its traceback.

    lit_llm raises `UserError` for mistakes. The constructors of torch, Lightning and of users' classes raise ValueError and
    others. Those count as mistakes too, unless code of lit_llm was running: then it can be a bug.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:  # jsonargparse wraps errors of constructors
        chain.append(cause)
    return any(isinstance(each, UserError) for each in chain) or not any(_ran_lit_llm(each) for each in chain)


def _ran_lit_llm(error: BaseException) -> bool:
    """Whether code of lit_llm, other than the command line's own, was running when the error was raised."""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module.startswith("lit_llm.") and not module.startswith("lit_llm.config."):
            return True
        trace = trace.tb_next
    return False


def _sentence(assignment: Assignment, error: str, known: Callable[[], list[str]], classes: list[str]) -> str:
    key, value, where = assignment.key, short(assignment.value), assignment.where
    if assignment.value is None and key in known():
        return f"{key} is null, but needs a value (--{key})"  # as `ranges.null_problems` says it
    unknown = "unrecognized arguments" in error or "is not accepted" in error or "is not expected" in error
    if unknown and key not in (keys := known()):
        return unknown_key(assignment, keys)
    named = assignment.value
    if classes and (not isinstance(named, str) or named.rpartition(".")[2] not in classes):
        hint = f"; did you mean {near}?" if (near := nearest_class(str(named), classes)) else ""
        return f"{key} is {value}, which is not a class that can be used here{hint} (known: {', '.join(classes)}) {where}"
    expected = re.findall(r"Expected an? (.+?)\. Got value", error) or re.findall(r"Subtypes: \[(.+)\]$", error, re.M)
    if expected:
        # A class may be expected around the value, such as the optimizer around its rate. The value's own type is last.
        own = next((each for each in expected if not re.search(r"\b(torch|lightning|lit_llm)\.", each)), expected[-1])
        kinds = re.sub(r"<class '([\w.]+)'>", r"\1", own).replace("NoneType", "null")
        kinds = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", kinds)
        if choices := _choices(kinds):
            near_values = difflib.get_close_matches(str(named), choices, n=3, cutoff=0.5)
            nearest = f" (nearest: {', '.join(near_values)})" if near_values else ""
            return f"{key} is {value}, it must be one of {', '.join(choices)}{nearest} {where}"
        return f"{key} is {value}, it must be of type {kinds} {where}"
    return f"{key} is {value}: {reason(error)} {where}"


def nearest_class(value: str, classes: list[str]) -> str | None:
    """The class whose name is most similar; capitals do not count: `adamw` is AdamW."""
    name = value.rpartition(".")[2].lower()
    by_lower = {each.lower(): each for each in reversed(classes)}
    near = difflib.get_close_matches(name, by_lower, n=1)
    return by_lower[near[0]] if near else None


def _choices(kinds: str) -> list[str]:
    """The values of a type that consists of Literal[…] and null only, each once; empty for any other type."""
    if re.sub(r"Literal\[[^\]]*\]|null|[,\s]", "", kinds):
        return []
    values = [str(value) for inner in re.findall(r"Literal\[([^\]]*)\]", kinds) for value in ast.literal_eval(f"[{inner}]")]
    return list(dict.fromkeys(values + ["null"] * ("null" in kinds))) if values else []

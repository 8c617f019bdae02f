"""Run checks, judge their outcomes, and make the certificate. This module does not import torch."""

from __future__ import annotations

import difflib
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from lit_llm.certify.processes import Job, run_ranks
from lit_llm.core.errors import UserError

FORMAT = 1
REQUIRED = "required"
"""The word that selects all required checks, in `--only required`."""


@dataclass(frozen=True)
class Figure:
    """Record of a check's measured value. The check passes if this is at most `tolerance`; None: the value is only recorded."""

    value: float
    tolerance: float | None = None
    unit: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """Description of a test of one promise in one case, such as one layout.

    Args:
        jobs: names of the jobs whose results are the arguments of `judge`, in this order.
        judge: function that returns the measured figure, or the reason why there is no figure.
        required: whether a skipped check counts as failed.
    """

    name: str
    jobs: tuple[str, ...]
    judge: Callable[..., Figure | str]
    required: bool = False


@dataclass(frozen=True)
class Group:
    """Description of checks that use results of the same jobs.

    Args:
        promise: the promise of lit_llm that the checks test, as a sentence.
        starts: (number of processes to start, {name: job} that the processes run one after another) for each start.
        unless: the reason why this machine can run none of the checks; "" if it can.
    """

    promise: str
    checks: tuple[Check, ...]
    starts: tuple[tuple[int, dict[str, Job]], ...] = ()
    unless: str = ""


@dataclass(frozen=True)
class Outcome:
    """Record of the outcome of one check, as the certificate has it."""

    name: str
    promise: str
    outcome: Literal["passed", "failed", "skipped", "recorded"]
    figure: float | None = None
    tolerance: float | None = None
    unit: str = ""
    required: bool = False
    reason: str = ""
    """Why the check was skipped, or why it failed without a figure; "" otherwise."""
    details: dict[str, Any] = field(default_factory=dict)


def run_checks(
    groups: Iterable[Group],
    only: tuple[str, ...],
    accelerator: str,
    seconds: float,
    on_outcomes: Callable[[list[Outcome]], None] = lambda outcomes: None,
    elsewhere: Mapping[int, Iterable[Group]] = MappingProxyType({}),
) -> tuple[list[Outcome], str | None]:
    """Run checks. Return (outcomes of the checks, why the checks ended early or None).

    Args:
        only: names of checks, or their beginnings, to run only these. (): all checks are run.
        seconds: the time after which no further job is started.
        on_outcomes: called with the outcomes of each group when the group's jobs have ended.
        elsewhere: {other number of devices: groups of checks for that number}, for the error if `only` names such a check.

    Raises:
        UserError: `only` has a word that matches no check, or the time did not suffice for a single check.
    """
    groups = list(groups)
    names = [check.name for group in groups for check in group.checks]
    for word in only:
        if word != REQUIRED and not any(_has(name, word) for name in names):
            for devices, others in elsewhere.items():
                if any(_has(check.name, word) for group in others for check in group.checks):
                    raise UserError(f"'{word}' needs {devices} devices: --devices {devices} (--only)")
            near = ", ".join(difflib.get_close_matches(word, names, n=3, cutoff=0.0))
            raise UserError(f"no check is called '{word}': use the name of a check, such as {near}, or its beginning (--only)")
    deadline, ended, all_outcomes = time.monotonic() + seconds, "", list[Outcome]()
    spent = f"the budget of {seconds / 60:g} minutes was spent (--budget)"
    for group in groups:
        checks = [check for check in group.checks if not only or any(_is(check, word) for word in only)]
        results: dict[str, dict[str, Any]] = {}
        if checks and not (group.unless or ended) and time.monotonic() < deadline:
            results, ended = _results(group, accelerator, {job for check in checks for job in check.jobs}, deadline)
        outcomes = [_outcome(group.promise, check, results, group.unless or ended or spent) for check in checks]
        if any(each.reason == spent for each in outcomes) and all(
            each.outcome == "skipped" for each in [*all_outcomes, *outcomes]
        ):
            raise UserError(f"the budget of {seconds / 60:g} minutes is too small for one check: raise it (--budget)")
        if not ended:
            outcomes = [_needed(each) for each in outcomes]
        on_outcomes(outcomes)
        all_outcomes += outcomes
    return all_outcomes, ended or None


def _needed(outcome: Outcome) -> Outcome:
    """Return `outcome`, changed to "failed" if the check is required and was skipped."""
    if not outcome.required or outcome.outcome != "skipped":
        return outcome
    return replace(outcome, outcome="failed", reason=f"it is required, but {outcome.reason}")


def _has(name: str, word: str) -> bool:
    """Whether `word` is the check's name `name`, or its beginning up to a "/": "losses" or "losses/ddp" of "losses/ddp/…"."""
    return f"{name}/".startswith(f"{word}/")


def _is(check: Check, word: str) -> bool:
    return check.required if word == REQUIRED else _has(check.name, word)


def _results(group: Group, accelerator: str, needed: set[str], deadline: float) -> tuple[dict[str, dict[str, Any]], str]:
    """Run the jobs of `group` that `needed` names. Return ({job: result}, why a process ended by itself or "").

    After a process ended by itself, new processes run the jobs that have no result yet."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="certify-") as folder:
        for ranks, jobs in group.starts:
            left = {name: job for name, job in jobs.items() if name in needed}
            while left and (seconds := deadline - time.monotonic()) > 0:
                new_results, ended = run_ranks(Path(folder), ranks, accelerator, left, seconds)
                if ended and (
                    killed := next((name for name in left if "kill_at" in left[name] and name not in new_results), None)
                ):
                    new_results[killed] = {"found": {}}  # the job was to be killed
                results |= new_results
                if ended and not new_results.keys() & left.keys():
                    return results, ended
                left = {name: job for name, job in left.items() if name not in results} if ended else {}
    return results, ""


def _outcome(promise: str, check: Check, results: dict[str, dict[str, Any]], why: str) -> Outcome:
    outcome = Outcome(check.name, promise, "skipped", required=check.required)
    for job in check.jobs:
        if "failed" in (result := results.get(job, {})):
            return replace(outcome, outcome="failed", reason=result["failed"])
        why = result.get("refused", why)
    if not check.jobs or any("found" not in results.get(job, {}) for job in check.jobs):
        return replace(outcome, reason=why)
    figure = check.judge(*(results[job]["found"] for job in check.jobs))
    if isinstance(figure, str):
        return replace(outcome, reason=figure)
    finite = math.isfinite(figure.value)  # NaN fails, and is written as no figure, because JSON has none
    passed: Any = "recorded" if figure.tolerance is None else "passed" if figure.value <= figure.tolerance else "failed"
    return replace(
        outcome,
        outcome=passed if finite else "failed",
        figure=figure.value if finite else None,
        tolerance=figure.tolerance,
        unit=figure.unit,
        details=figure.details,
        reason="" if finite else f"the figure is {figure.value}",
    )


def summary(outcomes: list[Outcome], machine: str) -> str:
    """Return the certificate's headline: how many required checks, and how many of all checks with a tolerance, passed.

    "certified in part": a check was skipped. "NOT certified": a check failed, or no check passed.
    """
    counts = Counter(each.outcome for each in outcomes)
    verdict = "certified in part" if counts["skipped"] else "certified"
    verdict = "NOT certified" if counts["failed"] or not counts["passed"] else verdict
    required = [each.outcome for each in outcomes if each.required]
    judged = counts["passed"] + counts["skipped"] + counts["failed"]
    share = f"{required.count('passed')} of {len(required)} required and {counts['passed']} of {judged} checks passed"
    return f"{verdict}: {share}, {counts['skipped']} skipped, {counts['failed']} failed on {machine}"


KINDS = ("kind", "passed", "required", "failed", "skipped", "recorded", "largest figure / tolerance")


def by_kind(checks: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row with the columns KINDS for each kind of check: the part of a check's name before the first "/".

    The column "required" has the number of required checks that passed, like "3 of 4"."""
    rows = []
    for kind in dict.fromkeys(each["name"].partition("/")[0] for each in checks):
        of_kind = [each for each in checks if each["name"].partition("/")[0] == kind]
        counts = Counter(each["outcome"] for each in of_kind)
        required = [each["outcome"] for each in of_kind if each["required"]]
        needed = f"{required.count('passed')} of {len(required)}" if required else ""
        near = max(
            (each["figure"] / each["tolerance"] for each in of_kind if each["figure"] and each["tolerance"]), default=None
        )
        others = (str(counts[name]) for name in ("failed", "skipped", "recorded"))
        rows.append((kind, str(counts["passed"]), needed, *others, "" if near is None else f"{near:.2g}"))
    return rows


def certificate(outcomes: list[Outcome], machine: dict[str, Any], ended: str | None, said: str) -> dict[str, Any]:
    """Return the certificate's content. `said`: the headline of `summary`; `ended`: why the checks ended early, or None."""
    checks = [{**asdict(each), "reproduce": _command(each.name, machine["devices"])} for each in outcomes]
    return {"format": FORMAT, "said": said, "machine": machine, "ended_early": ended, "checks": checks}


def _command(name: str, devices: int) -> str:
    """Return the shell command that runs only the check `name`."""
    return f"python -m lit_llm certify --devices {devices} --only '{name}'"


def table(outcomes: list[Outcome], devices: int) -> list[str]:
    """Return one line for each check, and below the line of a failed check the shell command that repeats the check."""
    lines = []
    for each in outcomes:
        figure = "" if each.figure is None else f"{each.figure:.3g}"
        limit = each.unit if each.tolerance is None else f"<= {each.tolerance:.3g}{each.unit and ' ' + each.unit}"
        needed = "required" if each.required else ""
        lines.append(f"{each.outcome:8s} {each.name:56s} {figure:>9s} {limit:10s} {needed:8s} {each.reason}".rstrip())
        if each.outcome == "failed":
            lines.append(f"         {_command(each.name, devices)}")
    return lines

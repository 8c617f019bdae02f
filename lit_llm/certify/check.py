"""One list of checks, their outcomes, and the certificate. No torch."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lit_llm.core.errors import UserError


@dataclass(frozen=True)
class Outcome:
    """What one check found."""

    name: str
    promise: str
    outcome: Literal["passed", "failed", "skipped"]
    figure: float | None = None
    tolerance: float | None = None
    """The largest figure that passes."""
    reason: str = ""
    """Why it was skipped, or what failed."""
    reproduce: str = ""
    """The command that runs this check alone."""


class DeviceDied(UserError):
    """A process of a check ended by itself. `shown` has what was found before."""

    def __init__(self, message: str, shown: list[Outcome]) -> None:
        super().__init__(message)
        self.shown = shown


@dataclass(frozen=True)
class Group:
    """Checks that share their processes, or one check."""

    name: str
    names: tuple[str, ...]
    run: Callable[[tuple[str, ...], float], list[Outcome]]
    """From the names to run and the seconds that are left to their outcomes."""


def judged(name: str, promise: str, figure: float, tolerance: float) -> Outcome:
    """Passed if the figure is at most the tolerance. NaN fails, and is written as no figure, because JSON has none."""
    good, finite = figure <= tolerance, math.isfinite(figure)
    reason = "" if finite else f"the figure is {figure}"
    return Outcome(name, promise, "passed" if good else "failed", figure if finite else None, tolerance, reason)


def failed(name: str, promise: str, reason: str) -> Outcome:
    """It ended without a figure."""
    return Outcome(name, promise, "failed", reason=reason)


def skipped(name: str, promise: str, reason: str) -> Outcome:
    """Not shown, and why."""
    return Outcome(name, promise, "skipped", reason=reason)


def run_checks(
    groups: Iterable[Group], only: tuple[str, ...], devices: int, seconds: float
) -> tuple[list[Outcome], str | None]:
    """The outcomes of all checks, or of those in `only`, and why it ended early (None: it did not).

    Raises:
        UserError: `only` has a name that no check has.
    """
    groups = list(groups)
    known = [name for group in groups for name in group.names]
    for name in only:
        if name not in known:
            raise UserError(f"no check is called '{name}'; the checks are {', '.join(known)} (--only)")
    deadline, found = time.monotonic() + seconds, []
    ended: str | None = None
    for group in groups:
        names = tuple(name for name in group.names if not only or name in only)
        left = deadline - time.monotonic()
        if not names:
            continue
        if left <= 0 or ended is not None:
            reason = ended or f"the budget of {seconds / 60:g} minutes was spent"
            found += [skipped(name, group.name, reason) for name in names]
            continue
        try:
            found += group.run(names, left)
        except DeviceDied as error:
            ended = str(error)
            shown = {each.name for each in error.shown}
            found += error.shown + [skipped(name, group.name, ended) for name in names if name not in shown]
    return [_reproducible(each, devices) for each in found], ended


def _reproducible(outcome: Outcome, devices: int) -> Outcome:
    command = f"python -m lit_llm certify --devices {devices} --only '{outcome.name}'"
    return Outcome(**{**asdict(outcome), "reproduce": command})


def summary(outcomes: list[Outcome], machine: str) -> str:
    """The last line: how many of each."""
    counts = Counter(each.outcome for each in outcomes)
    verdict = "NOT certified" if counts["failed"] or not counts["passed"] else "certified"
    return f"{verdict}: {counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed on {machine}"


def certificate(outcomes: list[Outcome], machine: dict[str, Any], ended: str | None) -> dict[str, Any]:
    """The certificate's content."""
    return {"machine": machine, "ended_early": ended, "checks": [asdict(each) for each in outcomes]}


def table(outcomes: list[Outcome]) -> str:
    """One line for each check."""
    lines = []
    for each in outcomes:
        figure = "" if each.figure is None else f"{each.figure:.3g}"
        limit = "" if each.tolerance is None else f"<= {each.tolerance:.3g}"
        lines.append(f"{each.outcome:8s} {each.name:56s} {figure:>10s} {limit:12s} {each.reason}".rstrip())
        if each.outcome == "failed":
            lines.append(f"         {each.reproduce}")
    return "\n".join(lines)

"""Rules of `doctor`, and findings: a rule with what it saw in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from lit_llm.reporting.doctor.observed import Observed, Unjudged

Seen = Callable[[Observed], str | None]
"""The function of a rule. It returns what it saw, with steps and figures, or None if the symptom is absent. It raises Unjudged
if the run lacks the curves to judge by."""


class Severity(IntEnum):
    """How bad a finding is. The lowest number comes first."""

    ERROR = 0
    """The run learns nothing, or something else than intended."""
    WARNING = 1
    """The run wastes much of its budget, or its result is worse than it need be."""
    ADVICE = 2
    """A setting is rarely what one wants. The curves show no harm yet."""


@dataclass(frozen=True)
class Rule:
    """A symptom, its likely cause, and what to do.

    Attributes:
        cause: the likely cause, as a sentence.
        change: the flag or the step that mends it.
        look_at: tags or files that confirm it.
        sure: one of `SURE`.
        explains: names of rules whose symptoms follow from this cause.
    """

    severity: Severity
    name: str
    cause: str
    change: str
    look_at: str
    sure: str
    explains: tuple[str, ...]
    seen: Seen

    def applies(self, run: Observed) -> bool:
        """Whether the symptom is there; false if the run lacks the curves to judge by."""
        try:
            return self.seen(run) is not None
        except Unjudged:
            return False


SURE = ("certain", "likely", "possible")
"""How sure the cause is if the symptom is there, the surest first."""


class _Rules:
    """Decorators that make a rule of a function: `@error.likely(cause, change, look_at, explains=…)`.

    The rule has the name of the function, with "-" for "_". Its thresholds were measured (docs/evidence/doctor.md), or a
    comment gives their reason. A comment after the decorator's parenthesis says why the cause is that sure.
    """

    def __init__(self, severity: Severity) -> None:
        self.certain, self.likely, self.possible = (partial(self._rule, severity, sure) for sure in SURE)

    @staticmethod
    def _rule(
        severity: Severity, sure: str, cause: str, change: str, look_at: str, explains: tuple[str, ...] = ()
    ) -> Callable[[Seen], Rule]:
        return lambda seen: Rule(severity, seen.__name__.replace("_", "-"), cause, change, look_at, sure, explains, seen)


SLOW = ("loss-stuck", "learning-rate-too-low", "under-fitting")
"""Findings that follow from a cause that keeps a model from learning."""
UNSTABLE = (
    *("diverged", "loss-spikes", "loss-not-finite", "large-logits", "guard-too-strict", "weight-decay-too-high"),
    *("gradient-norm-rises", "clipped-at-every-step"),
)
"""Findings that follow from updates that are too large."""
ROUGH = (*UNSTABLE, "learning-rate-too-high")
"""Findings that follow from a cause that makes training unstable."""
JUDGED = ("validation-unlike-training", "validation-differs", "over-fitting")
"""Findings that follow from a cause that makes validation and training incomparable."""
error, warning, advice = map(_Rules, Severity)


@dataclass(frozen=True)
class Finding:
    """A rule whose symptom is there.

    Attributes:
        seen: the text that the rule returned, with steps and figures.
        follows_from: names of findings that explain this one.
    """

    rule: Rule
    seen: str
    follows_from: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.rule.name

    def lines(self) -> list[str]:
        """The finding as text."""
        follows = f" (follows from {', '.join(self.follows_from)})" if self.follows_from else ""
        return [
            f"{self.rule.severity.name.lower()}: {self.name}{follows}",
            f"  seen    {self.seen}",
            f"  cause   {self.rule.cause} ({self.rule.sure})",
            f"  change  {self.rule.change}",
            f"  look at {self.rule.look_at}",
        ]

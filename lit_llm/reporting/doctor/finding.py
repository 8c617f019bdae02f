"""Rules of `doctor` (symptom, cause, remedy), and findings (a rule whose symptom a run shows)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from lit_llm.reporting.doctor.observed import Observed, Unjudged

Seen = Callable[[Observed], str | None]
"""The function of a rule. It returns a description of the symptom in a run, with steps and figures, or None if the run does not
have the symptom. It raises Unjudged if the run lacks the curves that the rule reads."""


class Severity(IntEnum):
    """Enumeration of how bad a finding is. Findings are listed by severity, the lowest number first."""

    ERROR = 0
    """The run learns nothing, or something else than intended."""
    WARNING = 1
    """The run wastes much of its budget, or its result is worse than it need be."""
    ADVICE = 2
    """A setting is rarely intended. The curves show no harm yet."""


@dataclass(frozen=True)
class Rule:
    """Record of a symptom of a run, its likely cause, and the remedy.

    Attributes:
        cause: the likely cause, as a sentence.
        change: the flag or the action that removes the cause.
        look_at: logged curves or files that confirm the cause.
        sure: how sure the cause is, one of `SURE`.
        explains: names of other rules whose symptoms follow from this cause.
        seen: the function that looks for the symptom in a run.
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
        """Whether the run shows the rule's symptom; False if the run lacks the curves that the rule reads."""
        try:
            return self.seen(run) is not None
        except Unjudged:
            return False


SURE = ("certain", "likely", "possible")
"""Words for how sure a rule's cause is if a run shows the symptom, the surest first."""


class _Rules:
    """Maker of decorators that turn a function (`Seen`) into a `Rule`: `@error.likely(cause, change, look_at, explains=…)`.

    The rule's name is the function's name with "-" for "_". The thresholds of rules were measured (docs/evidence/doctor.md), or
    a comment gives their reason. A comment after the decorator's opening parenthesis gives the reason for `sure`.
    """

    def __init__(self, severity: Severity) -> None:
        self.certain, self.likely, self.possible = (partial(self._rule, severity, sure) for sure in SURE)

    @staticmethod
    def _rule(
        severity: Severity, sure: str, cause: str, change: str, look_at: str, explains: tuple[str, ...] = ()
    ) -> Callable[[Seen], Rule]:
        return lambda seen: Rule(severity, seen.__name__.replace("_", "-"), cause, change, look_at, sure, explains, seen)


SLOW = ("loss-stuck", "learning-rate-too-low", "under-fitting")
"""Names of findings that follow from any cause that keeps a model from learning."""
UNSTABLE = (
    *("diverged", "loss-spikes", "loss-not-finite", "large-logits", "guard-too-strict", "weight-decay-too-high"),
    *("gradient-norm-rises", "clipped-at-every-step"),
)
"""Names of findings that follow from too large updates."""
ROUGH = (*UNSTABLE, "learning-rate-too-high")
"""Names of findings that follow from any cause that makes training unstable."""
JUDGED = ("validation-unlike-training", "validation-differs", "over-fitting")
"""Names of findings that follow from any cause that makes validation and training losses incomparable."""
error, warning, advice = map(_Rules, Severity)


@dataclass(frozen=True)
class Finding:
    """Record of a rule whose symptom a run shows.

    Attributes:
        seen: the rule's description of the symptom in this run, with steps and figures.
        follows_from: names of other findings whose cause explains this finding.
    """

    rule: Rule
    seen: str
    follows_from: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.rule.name

    def lines(self) -> list[str]:
        """Return the finding as lines of text: name, symptom, cause, remedy, and curves to look at."""
        follows = f" (follows from {', '.join(self.follows_from)})" if self.follows_from else ""
        return [
            f"{self.rule.severity.name.lower()}: {self.name}{follows}",
            f"  seen    {self.seen}",
            f"  cause   {self.rule.cause} ({self.rule.sure})",
            f"  change  {self.rule.change}",
            f"  look at {self.rule.look_at}",
        ]

"""All rules on one run."""

from __future__ import annotations

from dataclasses import replace

from lit_llm.reporting.doctor.data_rules import DATA_RULES
from lit_llm.reporting.doctor.finding import Finding, Rule
from lit_llm.reporting.doctor.loss_rules import LOSS_RULES
from lit_llm.reporting.doctor.observed import Observed
from lit_llm.reporting.doctor.optimizer_rules import OPTIMIZER_RULES
from lit_llm.reporting.doctor.speed_rules import SPEED_RULES

RULES: tuple[Rule, ...] = (*DATA_RULES, *OPTIMIZER_RULES, *LOSS_RULES, *SPEED_RULES)
_SURE = ("certain", "likely", "possible")


def diagnose(run: Observed) -> list[Finding]:
    """The findings about a run: causes before what follows from them, then by severity, then by how sure they are."""
    found = [Finding(rule, seen) for rule in RULES if (seen := rule.seen(run)) is not None]
    findings = [
        replace(finding, follows_from=tuple(other.name for other in found if finding.name in other.rule.explains))
        for finding in found
    ]
    return sorted(findings, key=lambda each: (bool(each.follows_from), each.rule.severity, _SURE.index(each.rule.sure)))

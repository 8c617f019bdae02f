"""Rules of `doctor` about preference tuning, from the curves that the objective `Preference` logs."""

from __future__ import annotations

import statistics

from lit_llm.reporting.doctor.finding import error, warning
from lit_llm.reporting.doctor.observed import Observed

LEAK_STEPS = 10
"""An accuracy of 1 by this step is suspicious: published runs reach 0.7 to 0.9 in hundreds of steps (Tunstall et al. 2023)."""
FALL = 10.0
"""Limit in nats per document of the fall of the answers' log-probability: each token of an answer of 100 tokens is then 1.1
times as unlikely."""


@warning.possible(
    "something other than quality tells chosen from rejected answers, such as their length, form or end",
    "compare lengths and first words of both; the same prompts in training and validation also do it",
    "train/accuracy, val/accuracy",
    explains=("loss-too-low",),
)
def preference_leak(run: Observed) -> str | None:
    if not run.points("train/accuracy"):
        return None
    accuracies = run.values("train/accuracy", least=2)
    first = next((step for step, value in run.finite("train/accuracy") if value == 1.0), None)
    if first is None or first > LEAK_STEPS or sum(accuracies[-5:]) / len(accuracies[-5:]) < 0.99:
        return None
    return f"every pair of step {first} was told apart, and nearly every pair since"


@error.likely(
    "chosen and rejected answers are swapped in training, or in validation",
    "look at the pairs of both: the same field must be the better answer",
    "train/accuracy, val/accuracy",
    explains=("over-fitting", "likelihoods-fall", "preference-leak"),
)
def pairs_swapped(run: Observed) -> str | None:
    if not run.points("train/accuracy"):
        return None
    train, val = run.smoothed("train/accuracy", least=1), run.values("val/accuracy", least=2)
    if train[-1][1] < 0.7 or statistics.median(val[-3:]) > 0.35 or max(val[-3:]) > 0.5:
        return None
    return f"accuracy came to {train[-1][1]:.0%} in training and to {val[-1]:.0%} in validation, which is worse than chance"


@warning.likely(
    "training tells its pairs apart, and validation does not: which answer is better is random, or pairs are learned by heart",
    "look at the pairs: a person must be able to tell the better answer; give more of them",
    "train/accuracy, val/accuracy",
    explains=("over-fitting", "likelihoods-fall", "preference-leak"),
)
def pairs_do_not_carry_over(run: Observed) -> str | None:
    if not run.points("train/accuracy"):
        return None
    train, val = run.smoothed("train/accuracy", least=1), run.values("val/accuracy", least=3)
    if train[-1][1] < 0.8 or not 0.35 < statistics.median(val[-3:]) < 0.55:
        return None
    return f"accuracy came to {train[-1][1]:.0%} in training and to {val[-1]:.0%} in validation"


@warning.likely(  # Pal et al. 2024, arXiv 2402.13228; Razin et al. 2024, arXiv 2410.08847
    "the margin grows because the rejected answers fall faster than the chosen ones, which fall too",
    "--objective.beta 0.3, a smaller --optimizer.lr, fewer steps, or sft on the chosen answers first",
    "train/margin, train/logp_chosen, train/logp_rejected",
)
def likelihoods_fall(run: Observed) -> str | None:
    if not run.points("train/margin"):
        return None
    curves = [run.smoothed(tag, least=2) for tag in ("train/margin", "train/logp_chosen", "train/logp_rejected")]
    margin, chosen, rejected = (points[-1][1] - points[0][1] for points in curves)
    if margin <= 0 or chosen > -FALL or rejected > -FALL:
        return None
    return (
        f"from step {curves[0][0][0]:,} to {curves[0][-1][0]:,} the margin grew by {margin:.2g}, while the chosen answers lost "
        f"{-chosen:.0f} nats per document and the rejected ones {-rejected:.0f}"
    )

"""Rules about preferences, from what the objective `Preference` logs."""

from __future__ import annotations

import math
import statistics

from lit_llm.reporting.doctor.finding import SLOW, error, warning
from lit_llm.reporting.doctor.observed import Observed

LEAK_STEPS = 10
"""Published runs take hundreds of steps to an accuracy of 0.7 to 0.9 (Tunstall et al. 2023)."""
FALL = 10.0
"""Nats per document. A document of 100 tokens is then 1.1 times as unlikely per token."""


@error.certain(  # equal documents have equal log-probabilities
    "chosen and rejected answers are the same to the model",
    "look at the data: prepare must write two different answers, and learn them",
    "train/margin, train/accuracy",
    explains=SLOW,
)
def pairs_alike(run: Observed) -> str | None:
    return _without_margin(run, of_equals=True)


@error.certain(  # a margin of exactly 0 for different answers
    "the reference is the trained model itself, so that there is no margin to learn",
    "keep the first weights as the reference",
    "train/margin, val/kl",
    explains=("loss-stuck",),
)
def reference_moves(run: Observed) -> str | None:
    return _without_margin(run, of_equals=False)


@warning.possible(  # answers of few tokens have such sums. Rafailov et al. 2023: the log-probability of the whole answer
    "log-probabilities of answers are means over their tokens, not sums, so that margins are far too small",
    "add the log-probabilities of an answer's tokens; divide by their number in simpo only",
    "train/logp_chosen, train/margin",
    explains=(*SLOW, "learning-rate-too-high", "learning-rate-too-low", "likelihoods-fall"),
)
def log_probabilities_averaged(run: Observed) -> str | None:
    values, uniform = run.values("train/logp_chosen"), run.uniform_loss
    simple = run.setting("objective.init_args.loss") == "simpo"
    if len(values) < 3 or uniform is None or simple or max(-value for value in values[:5]) > uniform:
        return None
    return f"a chosen answer has a log-probability of {values[0]:.2f} at first; one token of a uniform guess has {-uniform:.2f}"


@error.likely(  # at step 1 the model is its reference, so that every margin is 0, besides rounding
    "the reference is another model than the one that training started from, or its log-probabilities are of other answers",
    "take the reference from the weights that training starts from; compute it again for the same pairs in the same order",
    "train/margin and train/loss of step 1",
    explains=("preference-leak", "clipped-at-every-step"),
)
def reference_differs(run: Observed) -> str | None:
    first = next(((step, margin) for step, margin in run.finite("train/margin")), (0, 0.0))
    beta, with_reference = run.number("objective.init_args.beta"), run.setting("objective.init_args.loss") in ("dpo", "ipo")
    if first[0] != 1 or not beta or not with_reference or run.drops:
        return None
    if abs(first[1]) / beta >= 1:  # of nats per document
        return f"the margin was {first[1]:.3g} at step 1"
    loss = run.at_first("train/loss")
    if run.setting("objective.init_args.loss") != "dpo" or loss is None or abs(loss - math.log(2)) < 0.004:
        return None
    return f"the loss was {loss:.4f} at step 1; margins of 0 have ln 2 = 0.6931"


def _without_margin(run: Observed, *, of_equals: bool) -> str | None:
    """That no logged step behind the first has a margin, of answers that are equally likely in all steps, or not."""
    margins = [value for step, value in run.finite("train/margin") if step > 1]  # at first the model is the reference
    equal = run.values("train/logp_chosen") == run.values("train/logp_rejected")
    if len(margins) < 2 or any(margins) or equal is not of_equals:
        return None
    return f"the margin is exactly 0 in all {len(margins)} logged steps after the first"


@warning.possible(
    "something other than quality tells chosen from rejected answers, such as their length, form or end",
    "compare lengths and first words of both; the same prompts in training and validation also do it",
    "train/accuracy, val/accuracy",
    explains=("loss-too-low",),
)
def preference_leak(run: Observed) -> str | None:
    first = next((step for step, value in run.finite("train/accuracy") if value == 1.0), None)
    accuracies = run.values("train/accuracy")
    if first is None or first > LEAK_STEPS or len(accuracies) < 2 or sum(accuracies[-5:]) / len(accuracies[-5:]) < 0.99:
        return None
    return f"every pair of step {first} was told apart, and nearly every pair since"


@error.likely(
    "chosen and rejected answers are swapped in training, or in validation",
    "look at the pairs of both: the same field must be the better answer",
    "train/accuracy, val/accuracy",
    explains=("over-fitting", "likelihoods-fall", "preference-leak"),
)
def pairs_swapped(run: Observed) -> str | None:
    train, held = run.smoothed("train/accuracy"), run.values("val/accuracy")
    if not train or len(held) < 2 or train[-1][1] < 0.7 or statistics.median(held[-3:]) > 0.35 or max(held[-3:]) > 0.5:
        return None
    return f"accuracy came to {train[-1][1]:.0%} in training and to {held[-1]:.0%} in validation, which is worse than chance"


@warning.likely(
    "training tells its pairs apart, and validation does not: which answer is better is random, or pairs are learned by heart",
    "look at the pairs: a person must be able to tell the better answer; give more of them",
    "train/accuracy, val/accuracy",
    explains=("over-fitting", "likelihoods-fall", "preference-leak"),
)
def pairs_do_not_carry_over(run: Observed) -> str | None:
    train, held = run.smoothed("train/accuracy"), run.values("val/accuracy")
    if not train or len(held) < 3 or train[-1][1] < 0.8 or not 0.35 < statistics.median(held[-3:]) < 0.55:
        return None
    return f"accuracy came to {train[-1][1]:.0%} in training and to {held[-1]:.0%} in validation"


@warning.likely(  # Pal et al. 2024, arXiv 2402.13228; Razin et al. 2024, arXiv 2410.08847
    "the margin grows because the rejected answers fall faster than the chosen ones, which fall too",
    "--objective.beta 0.3, a smaller --optimizer.lr, fewer steps, or sft on the chosen answers first",
    "train/margin, train/logp_chosen, train/logp_rejected",
)
def likelihoods_fall(run: Observed) -> str | None:
    tags = ("train/margin", "train/logp_chosen", "train/logp_rejected")
    found = [run.smoothed(tag) for tag in tags]
    if any(len(points) < 2 for points in found):
        return None
    margin, chosen, rejected = (points[-1][1] - points[0][1] for points in found)
    if margin <= 0 or chosen > -FALL or rejected > -FALL:
        return None
    return (
        f"from step {found[0][0][0]:,} to {found[0][-1][0]:,} the margin grew by {margin:.2g}, while the chosen answers lost "
        f"{-chosen:.0f} nats per document and the rejected ones {-rejected:.0f}"
    )

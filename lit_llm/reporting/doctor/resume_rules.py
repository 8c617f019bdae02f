"""Rules about what a launch continues: schedule, weights and the optimizer's state."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from lit_llm.reporting.doctor import optimizer_rules
from lit_llm.reporting.doctor.finding import JUDGED, ROUGH, error
from lit_llm.reporting.doctor.loss_rules import scatter
from lit_llm.reporting.doctor.observed import Observed, Points


@error.likely(  # a schedule is a function of the step
    "the resumed run did not continue the schedule",
    "resume with the same schedule (--resume auto), and start a new run for a new one (--init_from)",
    "lr at the step of the resume",
    explains=("loss-jumps-at-resume", *ROUGH, "rate-rises-again"),
)
def schedule_restarted(run: Observed) -> str | None:
    rates = run.finite("lr")
    for first in run.first_steps:
        before = [rate for step, rate in rates if step <= first]
        # A restart repeats the beginning of the run. Two rows: one may be equal by chance.
        after = [(rate, _interpolated(rates, step - first)) for step, rate in rates if step > first][:4]
        repeats = [then is not None and abs(rate - then) <= 0.05 * then for rate, then in after]
        if first < 2 or not before or len(after) < 2 or not all(repeats):
            continue
        if max(abs(rate - before[-1]) for rate, _ in after) > 0.3 * before[-1]:
            return (
                f"the learning rate was {before[-1]:.3g} at step {first:,}, where the run was resumed, then {after[0][0]:.3g}, "
                "and went on as at the beginning of the run"
            )
    return None


def _interpolated(rates: Points, step: int) -> float | None:
    """The rate at a step between two rows."""
    for (left, low), (right, high) in itertools.pairwise(rates):
        if left <= step <= right:
            return low + (high - low) * (step - left) / (right - left)
    return None


@error.likely(  # the triangle inequality: norms cannot change by more than the updates between
    "other weights were put in place of the trained ones: they were drawn anew, or another checkpoint was loaded",
    "load the checkpoint after the model is built, and do not initialise it again",
    "setup/weight_norm, health/weight_norm, train/loss",
    explains=("loss-jumps-at-resume", "weights-changed-elsewhere", *ROUGH, *JUDGED),
)
def weights_replaced(run: Observed) -> str | None:
    started = run.finite("setup/weight_norm") if run.first_steps else []
    launches = [(run.start_of_launch(step) + 1, norm) for step, norm in started]
    if found := _jump("all weights", sorted({*run.total("weight_norm"), *launches}), dict(run.total("update_norm")), 3.0):
        return found
    updates = run.by_layer("update_norm")
    for layer, norms in run.by_layer("weight_norm").items():  # which vary more than all weights: at resumes only
        for first in run.first_steps:
            around = [point for point in norms if point[0] <= first][-1:] + [point for point in norms if point[0] > first][:1]
            if found := _jump(layer, around, dict(updates.get(layer, [])), 1.2):
                return found
    return None


def _jump(what: str, norms: Sequence[tuple[int, float]], updates: dict[int, float], most: float) -> str | None:
    """A change of a norm between two rows by more than `most` times the larger update, for each step between them."""
    for (step, norm), (later, after) in itertools.pairwise(norms):
        if step not in updates or later == step or after > 2 * norm:  # between two launches without a row; weights that explode
            continue
        largest = max(updates[step], updates.get(later, 0.0))
        if abs(after - norm) > most * largest * (later - step) + 1e-3 * norm:
            return (
                f"the norm of {what} went from {norm:.4g} at step {step:,} to {after:.4g} at step {later:,}, while one "
                f"update had a norm of at most {largest:.2g}"
            )
    return None


@error.possible(  # norms by layer go on
    "since the resume ids mean other tokens, or the text is another one: another tokenizer, vocabulary or data; else a setting "
    "of the model, as the norms of its weights go on",
    "resume with the tokenizer and the shards of the first launch",
    "train/loss and health/weight_norm at the step of the resume; decoded batches",
    explains=("loss-jumps-at-resume", *ROUGH, *JUDGED, "validation-other-text", "learning-rate-too-low"),
)
def text_changed_at_resume(run: Observed) -> str | None:
    said = loss_jumps_at_resume.seen(run)
    causes = (weights_replaced, optimizer_state_lost, schedule_restarted, optimizer_rules.parameters_not_trained)
    return None if said is None or not run.total("weight_norm") or any(rule.seen(run) for rule in causes) else said


@error.likely(
    "the resumed run did not continue with the same model or data: weights, their order, a setting or the tokenizer differ",
    "compare what was saved with what was loaded, by name (--resume auto restores it); look at decoded batches",
    "train/loss at the step of the resume",
    explains=(*ROUGH, *JUDGED),
)
def loss_jumps_at_resume(run: Observed) -> str | None:
    for first in (step for step in run.first_steps if step > 10):
        rows = run.finite("train/loss")
        before, after = [loss for step, loss in rows if step <= first][-6:], [loss for step, loss in rows if step > first][:4]
        rise = statistics.median(after) - statistics.median(before) if before and after else 0.0
        if len(before) == 6 and len(after) == 4 and rise > max(0.3, 4 * scatter(before + after)):
            return f"training loss rose by {rise:.2f} when the run was resumed at step {first:,} (usual: at most 0.1)"
    return None


@error.certain(  # no state where there was one
    "the optimizer has forgotten its averages of gradients",
    "restore the optimizer's state with the weights (--resume auto); do not clear it",
    "health/stateless, setup/stateless",
    explains=("loss-jumps-at-resume", *ROUGH, "over-fitting"),
)
def optimizer_state_lost(run: Observed) -> str | None:
    sampled, lost = run.finite("health/stateless"), run.last("setup/stateless")
    if lost is not None and lost > 0.5 and any(share < 0.5 for _, share in sampled):
        return f"{lost:.0%} of the parameters had no state when the run was resumed"
    kind = str(run.setting("optimizer.class_path", "SGD"))
    always = [share for step, share in sampled if step > 1]
    with_state = next((step for step, share in sampled if share < 0.5), math.inf)
    if gone := [step for step, share in sampled if share > 0.5 and step > with_state]:
        return f"the parameters had no state before the update at step {gone[0]:,}, but had some at step {with_state:,}"
    if (
        len(always) > 1
        and min(always) > 0.5
        and not kind.endswith("SGD")
        and not optimizer_rules.parameters_not_trained.seen(run)
    ):
        return f"in every sampled step {min(always):.0%} of the parameters had no state before the update"
    return None

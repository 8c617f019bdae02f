"""Rules about the gradients of a step: what the backward passes gave, and what the optimizer gets."""

from __future__ import annotations

import statistics

from lit_llm.reporting.doctor.finding import ROUGH, SLOW, error
from lit_llm.reporting.doctor.observed import Observed

_RATE = (*SLOW, *ROUGH, "clipped-at-every-step")


def _shares(run: Observed) -> tuple[list[float], int]:
    """(gradient of the step times that of its first micro-batch over the latter's square, by row; micro-batches of a step).

    Of the rows with the commonest number of micro-batches, which a batch ramp changes.
    """
    counts = dict(run.finite("health/micro_batches"))
    count = statistics.mode(counts.values()) if counts else 0.0
    return [share for step, share in run.finite("health/first_gradient_share") if counts.get(step) == count], int(count)


@error.certain(  # they are 0 or None after zero_grad
    "the gradients of earlier steps are not cleared",
    "optimizer.zero_grad() before the first backward pass of each step",
    "health/leftover_gradient",
    explains=_RATE,
)
def gradients_not_cleared(run: Observed) -> str | None:
    left = run.values("health/leftover_gradient")
    if len(left) < 2 or statistics.median(left) == 0:
        return None
    return f"gradients had a norm of {statistics.median(left):.3g} before the first backward pass of a step (median)"


@error.likely(  # Micikevicius et al. 2018, Mixed precision training
    "most gradients are exactly zero: they underflow for lack of a loss scale, or are masked",
    "--trainer.precision bf16-mixed; scale the loss in fp16",
    "health/zero_gradients",
    explains=(*_RATE, "gradients-changed", "parameters-not-trained"),
)
def gradients_vanish(run: Observed) -> str | None:
    share = run.median("health/zero_gradients", 1)
    if share is None or share < 0.5 or run.setting("model.moe"):  # experts without tokens have none
        return None
    if not any(norm for step, norm in run.total("gradient_norm") if step > 1):  # nothing is trained
        return None
    return f"{share:.0%} of the gradients of matrices are exactly 0"


@error.likely(  # a sum of gradients contains the square of each
    "only a part of the micro-batches has an effect: gradients are cleared between them",
    "clear gradients once in a step, before its first backward pass",
    "health/first_gradient_share, health/micro_batches",
    explains=_RATE,
)
def micro_batches_lost(run: Observed) -> str | None:
    shares, count = _shares(run)
    # Later a batch that is known by heart has no gradient, although its parts have.
    share = statistics.median(shares[:5]) if len(shares) > 1 else 1.0
    several = [each for each in run.values("health/micro_batches") if each > 1]
    if len(several) > 2 and not run.points("health/first_gradient_share"):
        return "the first micro-batch of a step had no gradient at all, in all sampled steps"
    if count < 2 or share > 0.95:
        return None
    return f"the step's gradient has {share:.0%} of its first micro-batch's in it (a sum of {count} has at least 100 %)"


@error.certain(  # equal gradients add up to a multiple
    "the micro-batches of a step are the same samples",
    "look at the sampler: it must advance with each micro-batch",
    "health/first_gradient_share, health/repeated_samples",
    explains=("duplicated-data", "batch-repeated", "over-fitting", "no-better-than-counts"),
)
def micro_batches_alike(run: Observed) -> str | None:
    shares, count = _shares(run)
    if count < 2 or len(shares) < 2 or max(abs(share / count - 1) for share in shares) > 1e-3:
        return None
    return f"the gradient of a step is {count} times that of its first micro-batch, in all {len(shares)} sampled steps"


@error.likely(  # the gradient of one micro-batch is that of the step
    "something changes gradients before the optimizer: a sum instead of a mean, a loss scale that stays in, gradients of "
    "earlier steps, a mask, or noise",
    "look at code that touches `grad`; divide by the number of micro-batches once",
    "health/first_gradient_share, grad/norm",
    explains=_RATE,
)
def gradients_changed(run: Observed) -> str | None:
    shares, count = _shares(run)
    if len(shares) < 2 or not count:
        return None
    share = statistics.median(shares[:5])  # at first micro-batches agree most
    if count == 1:
        others = [each for each in shares if abs(each - 1) > 0.01]
        share = statistics.median(others) if len(others) > 1 else 1.0
    if share > 1.3 * count or (count == 1 and share != 1 and statistics.median(shares) > -0.5):  # else `ascent` says so
        return f"the step's gradient has {share:.3g} times its first micro-batch's in it, but there are {count} micro-batches"
    return None


@error.likely(  # the sign of update times gradient
    "updates go up the gradient: a sign is wrong",
    "subtract the gradient; maximize=False; minimise the loss, not its negative",
    "health/descent, train/loss",
    explains=_RATE,
)
def update_increases_loss(run: Observed) -> str | None:
    """At step 1, where no earlier gradient counts, a layer goes up; or the median layer does in the first rows."""
    found = {layer: [value for _, value in points[:3]] for layer, points in run.by_layer("descent").items() if points}
    first = {layer: points[0][1] for layer, points in run.by_layer("descent").items() if points and points[0][0] <= 1}
    up = sorted(layer for layer, cosine in first.items() if cosine < -0.05)
    middle = statistics.median(statistics.mean(values) for values in found.values()) if found else 0.0
    shares, count = _shares(run)
    if len(shares) > 1 and count == 1 and statistics.median(shares) < -0.5:
        return f"the optimizer gets {statistics.median(shares):.3g} times the gradient of the backward pass"
    if not up and middle > -0.05:
        return None
    which = f"of {', '.join(up[:4])}{' and others' if len(up) > 4 else ''}" if up else "of half of the layers"
    cosine = -min((first[layer] for layer in up), default=middle)
    return f"the first updates {which} have a cosine of {cosine:.2f} with the gradient (usual: below -0.1)"

"""Rules about the gradients of a step: what the backward passes gave, and what the optimizer gets."""

from __future__ import annotations

import statistics

from lit_llm.reporting.doctor.finding import ROUGH, SLOW, UNSTABLE, error
from lit_llm.reporting.doctor.observed import Observed


@error.likely(  # Micikevicius et al. 2018, Mixed precision training
    "most gradients are exactly zero: they underflow for lack of a loss scale, or are masked",
    "--trainer.precision bf16-mixed; scale the loss in fp16",
    "health/zero_gradients",
    explains=(*SLOW, *UNSTABLE, "parameters-not-trained"),
)
def gradients_vanish(run: Observed) -> str | None:
    if run.setting("model.moe") or (share := run.median("health/zero_gradients", 1)) < 0.5:  # experts without tokens have none
        return None
    if not any(norm for step, norm in run.total("gradient_norm") if step > 1):  # nothing is trained
        return None
    return f"{share:.0%} of the gradients of matrices are exactly 0"


@error.likely(  # the sign of update times gradient
    "updates go up the gradient: a sign is wrong",
    "subtract the gradient; maximize=False; minimise the loss, not its negative",
    "health/descent, train/loss",
    explains=(*SLOW, *ROUGH),
)
def update_increases_loss(run: Observed) -> str | None:
    """At step 1, where no earlier gradient counts, a layer goes up; or the median layer does in the first rows."""
    found = {layer: [value for _, value in points[:3]] for layer, points in run.by_layer("descent", least=1).items() if points}
    first = {layer: points[0][1] for layer, points in run.by_layer("descent").items() if points and points[0][0] <= 1}
    up = sorted(layer for layer, cosine in first.items() if cosine < -0.05)
    middle = statistics.median(statistics.mean(values) for values in found.values()) if found else 0.0
    if not up and middle > -0.05:
        return None
    which = f"of {', '.join(up[:4])}{' and others' if len(up) > 4 else ''}" if up else "of half of the layers"
    cosine = -min((first[layer] for layer in up), default=middle)
    return f"the first updates {which} have a cosine of {cosine:.2f} with the gradient (usual: below -0.1)"

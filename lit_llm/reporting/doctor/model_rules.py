"""Rules about the model: its initial weights, attention, norms, and what it has learned beside a table of pairs."""

from __future__ import annotations

from lit_llm.reporting.doctor.finding import SLOW, error
from lit_llm.reporting.doctor.observed import Observed

SCORE = 30.0
"""At initialisation. Softmax of normal scores of this standard deviation has no entropy left; healthy models begin below 5."""


@error.likely(  # x / sqrt(mean square + epsilon); of branches that begin at zero and are normed, it was 10 times at step 60
    "the epsilon of a norm is larger than what it normalises",
    "an epsilon of 1e-5 or 1e-6; larger weights of the embedding",
    "health/norm_epsilon, health/activation_rms",
    explains=SLOW,
)
def norms_do_not_normalise(run: Observed) -> str | None:
    ratio = run.median("health/norm_epsilon", run.step // 2)
    if not 100 <= ratio < 1e12:  # beyond, its input is zero
        return None
    return f"an epsilon is {ratio:.3g} times the mean square of its norm's input"


@error.likely(
    "attention scores are too large, so that each position sees one other: the scale is not 1 / sqrt(width of a head)",
    "remove --model.attention_scale; divide the scores by the root of the width of a head",
    "health/attention_logit_max",
    explains=(*SLOW, "learning-rate-too-high", "no-context"),
)
def attention_saturated(run: Observed) -> str | None:
    if not run.from_scratch:
        return None
    layers = run.by_layer("attention_logit_max", least=1)
    first = [points[0][1] for points in layers.values() if points and points[0][0] <= 1] or [0.0]
    if max(first) < SCORE:
        return None
    return f"the largest attention score before softmax was {max(first):.0f} at step 1, with initial weights"


@error.certain(  # logits behind a changed input must change
    "no position sees another one that is a quarter of the sequence before it: attention is off, or sees too little",
    "look at the attention mask, the window and the projections",
    "health/context_use, health/loss_by_position",
    explains=(*SLOW, "parameters-not-trained"),
)
def no_context(run: Observed) -> str | None:
    if any(run.setting(f"model.{key}") for key in ("mask_documents", "window", "layers.window")):
        return None  # attention is to see less than the whole sequence
    values = run.values("health/context_use", least=2)
    return None if max(values) > 0 else "other inputs in three quarters of a sequence did not change its last logits at all"

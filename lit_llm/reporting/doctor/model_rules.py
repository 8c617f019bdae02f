"""Rules about the model: its initial weights, attention, norms, and what it has learned beside a table of pairs."""

from __future__ import annotations

import statistics

from lit_llm.reporting.doctor.finding import ROUGH, SLOW, error, warning
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
    if ratio is None or not 100 <= ratio < 1e12:  # beyond, its input is zero
        return None
    return f"an epsilon is {ratio:.3g} times the mean square of its norm's input"


@error.likely(
    "a block does not add its input to its output",
    "x + branch(x) in that block",
    "health/residual",
    explains=(*SLOW, *ROUGH),
)
def residual_lost(run: Observed) -> str | None:
    """A block begins by forgetting its input, which the others keep. Not the first block, whose input may be small."""
    first = {layer: points[0][1] for layer, points in run.by_layer("residual").items() if points and points[0][0] <= 1}
    if len(first) < 2 or not run.from_scratch:
        return None
    largest = max(first[layer] for layer in sorted(first)[1:])
    if largest < 0.1:  # of post-norm blocks: 0.17
        return (
            f"at step 1 input and output of all blocks but the first had a cosine of {largest:.2f} or less: none adds its input"
        )
    lowest = min(sorted(first)[1:], key=lambda layer: first[layer])
    others = statistics.median(value for layer, value in first.items() if layer != lowest)
    if first[lowest] > 0.2 or others < 0.5:
        return None
    return f"at step 1 input and output of {lowest} had a cosine of {first[lowest]:.2f}, those of other blocks {others:.2f}"


@error.likely(
    "a layer is unlike the others: its initial weights, its scale, its learning rate, or its gradient",
    "what is different about that layer: its initialisation, its parameter group, its place in the model",
    "health/weight_norm, health/update_ratio, health/gradient_norm of that layer",
    explains=("loss-stuck", "learning-rate-too-low", "no-better-than-counts"),
)
def layer_unlike_others(run: Observed) -> str | None:
    return (_unlike_other_blocks(run) or _outgrows(run) or _moves_otherwise(run)) if run.from_scratch else None


def _unlike_other_blocks(run: Observed) -> str | None:
    """A layer beside the same layer of the other blocks."""
    for group, most, first in (("weight_norm", 4.0, True), ("update_ratio", 5.0, True), ("gradient_norm", 100.0, False)):
        alike: dict[str, dict[str, float]] = {}
        for layer, points in run.by_layer(group).items():
            base, _, rest = layer.partition(".")
            number, _, kind = rest.partition(".")
            if "mlp" in kind and run.setting("model.moe"):  # dense blocks and experts have other sizes
                continue
            if number.isdigit() and kind and _is_matrix(kind) and points:
                value = points[0][1] if first else statistics.median(value for _, value in points)
                alike.setdefault(f"{base}.{kind}", {})[layer] = value
        for sizes in alike.values():
            middle = statistics.median(sizes.values())
            for layer, size in sizes.items():
                if len(sizes) > 2 and size > 0 and middle > 0 and max(size / middle, middle / size) > most:
                    at = " at first" if first else ""
                    return f"health/{group}/{layer} was {size:.3g}{at}, and {middle:.3g} in the middle of all blocks"
    return None


def _outgrows(run: Observed) -> str | None:
    """A layer whose norm grows far more than that of the middle layer."""
    norms = {
        layer: [value for step, value in points if step <= max(200, 2 * run.warmup_steps)]
        for layer, points in run.by_layer("weight_norm").items()
        if len(points) > 2 and points[0][0] <= 1 and _is_matrix(layer)
    }
    growths = {layer: max(sizes) / sizes[0] for layer, sizes in norms.items() if sizes[0] > 0}
    middle = statistics.median(growths.values()) if growths else 0.0
    for layer, growth in growths.items():  # healthy runs: up to 4.7 times the middle one's
        if growth > 8 * middle:
            return f"{layer} grew to {growth:.0f} times its norm, the middle layer to {middle:.1f}"
    return None


def _moves_otherwise(run: Observed) -> str | None:
    """A layer whose updates are far smaller or larger, beside its norm, than those of the middle layer."""
    paths = {  # not at step 1, where matrices that begin at zero change by far more
        layer: statistics.mean(value for step, value in points if step > 1)
        for layer, points in run.by_layer("update_ratio").items()
        if len(points) > 3 and _is_matrix(layer)
    }
    middle = statistics.median(paths.values()) if paths else 0.0
    for layer, path in paths.items():
        if 0 < path < 0.03 * middle or path > 12 * middle > 0:
            return f"one step changed {layer} by {path:.2g} of its norm, and the middle layer by {middle:.2g} (means)"
    return None


def _is_limited(run: Observed) -> bool:
    """Whether attention is to see less than the whole sequence."""
    return any(run.setting(f"model.{key}") for key in ("mask_documents", "window", "layers.window"))


def _is_matrix(layer: str) -> bool:
    """Not norms and short convolutions, which have few weights and may begin at zero."""
    return not layer.endswith(("norm", "convolution"))


@error.likely(
    "attention scores are too large, so that each position sees one other: the scale is not 1 / sqrt(width of a head)",
    "remove --model.attention_scale; divide the scores by the root of the width of a head",
    "health/attention_logit_max",
    explains=(*SLOW, "learning-rate-too-high", "no-context", "context-cut"),
)
def attention_saturated(run: Observed) -> str | None:
    first = [points[0][1] for points in run.by_layer("attention_logit_max").values() if points and points[0][0] <= 1]
    if not first or not run.from_scratch or max(first) < SCORE:
        return None
    return f"the largest attention score before softmax was {max(first):.0f} at step 1, with initial weights"


@error.certain(  # logits behind a changed input must change
    "no position sees another one that is a quarter of the sequence before it: attention is off, or sees too little",
    "look at the attention mask, the window and the projections",
    "health/context_use, health/loss_by_position",
    explains=(*SLOW, "parameters-not-trained"),
)
def no_context(run: Observed) -> str | None:
    values = run.values("health/context_use", run.step // 2)
    if len(values) < 2 or max(values) > 0 or _is_limited(run):
        return None
    return "other inputs a quarter of a sequence before did not change its last logits at all"


@error.likely(  # logits behind a changed input must change
    "most positions do not see a quarter of the sequence before them: a window or another mask of attention is too narrow",
    "look at the mask of attention; model.window and mask_documents do not ask for this",
    "health/context_lost, health/loss_by_position",
    explains=SLOW,
)
def context_cut(run: Observed) -> str | None:
    share = run.median("health/context_lost", run.step // 2)
    if share is None or not 0.3 < share < 1 or _is_limited(run):
        return None
    return f"other inputs a quarter of a sequence before did not change {share:.0%} of its last logits at all"


@warning.possible(
    "the model uses hardly any context: layers are broken, or hardly trained",
    "look at what changed in the model; compare with a run without it",
    "train/loss against health/unigram_loss and health/bigram_loss",
)
def no_better_than_counts(run: Observed) -> str | None:
    behind = run.behind_pairs
    if behind is None or behind < 0.75 or not run.from_scratch or not run.is_complete or run.step < 100:
        return None
    pairs, single = run.recent("health/bigram_loss"), run.recent("health/unigram_loss")
    loss = statistics.median(run.values("train/loss")[-5:])
    return f"training loss is {loss:.3f}; counting tokens gives {single:.3f}, counting pairs of tokens {pairs:.3f}"

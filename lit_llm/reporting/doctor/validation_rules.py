"""Rules about what validation measures."""

from __future__ import annotations

import math
import statistics

from lit_llm.reporting.doctor.finding import JUDGED, ROUGH, SLOW, error, warning
from lit_llm.reporting.doctor.observed import Observed


@error.certain(  # two evaluations of the same batch
    "dropout or other noise is on in validation: the model is not in eval mode",
    "module.eval() before validation; remove module.train() from validation_step",
    "health/validation_noise",
    explains=(*JUDGED, "future-leak"),
)
def validation_is_random(run: Observed) -> str | None:
    largest = max(run.values("health/validation_noise"), default=0.0)
    return f"two evaluations of the same batch differ by {largest:.1%} of the largest logit" if largest > 0.01 else None


@warning.certain(  # the shapes of the batches
    "validation has other sequences than training, so that its loss is of less context",
    "the same block_size in training and validation",
    "health/validation_length",
    explains=(*JUDGED, "validation-counts-others"),
)
def validation_sequences_shorter(run: Observed) -> str | None:
    ratios = run.values("health/validation_length")
    if len(ratios) < 2 or max(ratios) > 0.7:  # a batch may be padded to less
        return None
    return f"a sequence of validation has {max(ratios):.2f} times the tokens of training's, or less"


@warning.likely(  # both are counted; texts of other lengths have other padding
    "the masks of training and validation differ: targets that one ignores, such as questions, padding or what a length limit "
    "cuts off, count in the other",
    "ignore the same tokens in both (targets of -100)",
    "health/validation_ignored_targets against health/ignored_targets",
    explains=JUDGED,
)
def validation_counts_others(run: Observed) -> str | None:
    """The shares of targets that count are far apart."""
    training, validation = run.median("health/ignored_targets"), run.median("health/validation_ignored_targets")
    if training is None or validation is None:
        return None
    least, most = sorted((1 - training, 1 - validation))
    if most < 1.6 * least + 0.02 and not (most == 1 and least < 0.9):
        return None
    return f"{training:.0%} of the targets of training are ignored, and {validation:.0%} of those of validation"


@error.certain(  # the definition of next-token prediction
    "inputs and targets of validation do not belong together: shifted once too often or not at all, or some of either replaced",
    "look at a batch of the validation data",
    "health/validation_shifted_targets",
    explains=JUDGED,
)
def validation_targets_unrelated(run: Observed) -> str | None:
    share = run.median("health/validation_shifted_targets")
    return None if share is None or share > 0.9 else f"only {share:.1%} of the counted targets of validation are the next input"


@error.certain(  # the same loss to seven digits
    "validation evaluates other weights than those that are trained, such as the model without its adapters",
    "evaluate the model that is trained; merge or keep the adapters",
    "val/loss",
    explains=JUDGED,
)
def validation_does_not_move(run: Observed) -> str | None:
    values, train = run.values("val/loss"), run.smoothed("train/loss")
    fell = bool(train) and train[-1][1] < 0.99 * train[0][1]  # else it is training that does not move
    if len(values) < 3 or not fell or max(values) - min(values) > 1e-7 * abs(values[0]) or not _moves(run):
        return None
    return f"val/loss is {values[0]:.6f} in all {len(values)} validations, while training changed the weights"


def _moves(run: Observed) -> bool:
    """Whether most sampled steps have changed most layers."""
    changes = [value for points in run.by_layer("update_norm").values() for _, value in points]
    return bool(changes) and statistics.median(changes) > 0


@warning.likely(
    "the validation text is of another kind than the training text, or one of them was changed, or encoded otherwise",
    "split one text by document (`prepare --data.val_fraction 0.1`)",
    "health/validation_bigram_loss against health/bigram_loss",
    explains=("validation-differs", "over-fitting"),
)
def validation_other_text(run: Observed) -> str | None:
    """Counts of the training text fit the validation text badly, so that it is not the model's fault."""
    losses = _losses_of_counts(run)
    if losses is None or losses[1] < 1.4 * losses[0] + 0.3:
        return None
    return "counted pairs of training tokens give {:.2f} nats on training and {:.2f} on validation text".format(*losses)


@warning.likely(  # by the time that pairs can be counted, a text of one kind has shown its tokens
    "the validation text has tokens that training never shows: one of them was cleaned, cased or encoded otherwise",
    "clean and prepare both splits in one way (`clean`, `prepare --data.val_fraction 0.1`)",
    "health/validation_unseen, decoded batches of both",
    explains=("validation-other-text", "validation-differs", "over-fitting"),
)
def validation_has_other_tokens(run: Observed) -> str | None:
    share = run.recent("health/validation_unseen")
    if share is None or share < 0.01 or not run.from_scratch:
        return None
    return f"{share:.1%} of the targets of validation never were targets of training"


@warning.likely(
    "the training text has random tokens, all along or for a while, or is much harder to predict than the validation text",
    "look at decoded batches of the training data",
    "health/bigram_loss against health/validation_bigram_loss",
    explains=(*SLOW, *ROUGH, *JUDGED, "tokens-shuffled"),
)
def noise_in_training(run: Observed) -> str | None:
    rows = [(step, loss) for step, loss in run.counted("health/bigram_loss") if step > run.start_of_launch(step) + 20]
    usual = statistics.median(loss for _, loss in rows) if len(rows) > 5 else math.inf
    spell = [step for step, loss in rows if loss > usual + 2.5]  # healthy runs, batches of one sequence too: at most 1.3
    if len(spell) > 1:
        return (
            f"from step {spell[0]:,} to {spell[-1]:,} counted pairs of tokens give much more than their usual {usual:.2f} nats"
        )
    losses = _losses_of_counts(run)
    if losses is None or losses[0] < 1.2 * losses[1] + 0.2:
        return None
    return "counted pairs of training tokens give {:.2f} nats on training and {:.2f} on validation text".format(*losses)


@error.likely(  # the same sequences are evaluated again
    "val/loss is not the loss of the validation batches: sums are not reset, other weights are evaluated, or it is divided by "
    "another number",
    "compute the loss of one validation batch, and compare; reset the metric before each validation",
    "val/loss against health/validation_batch_loss",
    explains=("validation-unlike-training", "validation-differs", "over-fitting"),
)
def validation_metric_wrong(run: Observed) -> str | None:
    """The distance of a batch from all batches changes from validation to validation, or is large in all of them."""
    pairs = _evaluated_again(run)
    if len(pairs) < 3 or run.setting("ema") or "Averaging" in str(run.setting("trainer.callbacks")):
        return None
    gaps = [value - other for _, value, other in pairs]
    is_far = all(abs(gap) > max(1.0, 0.3 * other) for gap, (_, _, other) in zip(gaps, pairs, strict=True))
    if not is_far and max(gaps) - min(gaps) < 0.3 + 0.1 * abs(pairs[0][1] - pairs[-1][1]) + 0.05 * pairs[-1][2]:
        return None
    step, value, other = pairs[gaps.index(max(gaps, key=abs))]
    least = min(gaps, key=abs)
    return (
        f"val/loss is {value:.3f} at step {step:,}, some of its sequences have {other:.3f}; elsewhere they differ by "
        f"{least:+.3f}"
    )


def _evaluated_again(run: Observed) -> list[tuple[int, float, float]]:
    """(step, val/loss, loss of some sequences of the first batch), where the two can be compared."""
    again = dict(run.finite("health/validation_batch_loss"))
    if run.points("train/margin") or run.setting("model.mask_documents"):  # another loss; other documents are seen
        return []
    return [(step, value, again[step]) for step, value in run.finite("val/loss") if step in again and step > 0]


@error.likely(  # sequences of the same batch are evaluated again
    "train/loss is not the mean cross-entropy of the model's logits at the targets: label smoothing, a further loss, noise, "
    "another function of the logits, or another divisor",
    "compute the cross-entropy of one training batch, and compare",
    "train/loss against health/loss_by_position",
    explains=(*SLOW, "validation-metric-wrong", "validation-differs", "loss-too-low"),
)
def training_loss_differs(run: Observed) -> str | None:
    """The loss of the step's sequences that were evaluated again is far from that of the step, always in one direction."""
    has_dropout = run.number("model.dropout") is None or run.drops  # or may; it is off when they are evaluated again
    other_loss = run.points("train/margin") or run.setting("objective.init_args.weight")
    if has_dropout or other_loss or run.setting("model.mask_documents"):
        return None
    if (run.median("health/ignored_targets") or 0.0) > 0.05:  # quarters with few targets weigh as much as others
        return None
    quarters = [dict(run.finite(f"health/loss_by_position/{i}")) for i in range(1, 5)]
    pairs = [
        (value, statistics.mean(each[step] for each in quarters))
        for step, value in run.finite("train/loss")
        if step > 1 and all(step in each for each in quarters)
    ]
    gaps = sorted((value - again) / max(again, 0.2) for value, again in pairs)
    if len(gaps) < 8 or not (gaps[len(gaps) // 5] > 0.05 or gaps[-1 - len(gaps) // 5] < -0.05):
        return None
    value, again = (statistics.median(each) for each in zip(*pairs, strict=True))
    if abs(statistics.median(gaps)) < 0.15:
        return None
    return f"train/loss is {value:.3f} in the median step, and {again:.3f} where some of its sequences are evaluated again"


@warning.certain(  # its definition
    "val/perplexity is not e to the power of val/loss, such as a mean of the batches' perplexities",
    "take the exponential of the mean loss over all targets, once",
    "val/perplexity against val/loss",
)
def perplexity_wrong(run: Observed) -> str | None:
    found = dict(run.finite("val/perplexity"))
    for step, loss in run.finite("val/loss"):
        if step in found and loss < 20 and abs(math.log(max(found[step], 1e-9)) - loss) > 0.01 * loss + 1e-3:
            return f"val/perplexity is {found[step]:.4g} at step {step:,}, but e^loss is {math.exp(loss):.4g}"
    return None


@warning.possible(
    "validation and training measure different things: the mode, the mask, padding, noise, the weights or the metric differ",
    "evaluate one training batch in both ways, and compare",
    "val/loss against train/loss",
    explains=("over-fitting",),
)
def validation_differs(run: Observed) -> str | None:
    """Losses are further apart than counts of tokens say that the texts are."""
    curve, train = run.finite("val/loss"), run.smoothed("train/loss")
    if len(curve) < 2 or not train or run.points("train/margin") or (run.passes or 0.0) > 3 or not run.is_complete:
        return None
    text = _losses_of_counts(run)
    if text is None or curve[-1][1] > 1.02 * min(loss for _, loss in curve):  # what is learned by heart is another matter
        return None
    gap, expected = curve[-1][1] - train[-1][1], text[1] - text[0]
    # Healthy runs: up to 0.6 above what is expected, and at least -0.05.
    if min(0.0, expected) - 0.5 < gap < max(0.0, expected) + 1:
        return None
    return f"validation loss is {curve[-1][1]:.3f}, training loss {train[-1][1]:.3f}"


def _losses_of_counts(run: Observed) -> tuple[float, float] | None:
    """Of counted pairs: on training and on validation text. None if too few were counted to tell them from single tokens."""
    of_training, of_validation = run.recent("health/bigram_loss"), run.recent("health/validation_bigram_loss")
    single = run.recent("health/unigram_loss")
    if of_validation is None or of_training is None or single is None or not run.from_scratch:
        return None
    return (of_training, of_validation) if min(of_training, of_validation) < 0.9 * single else None


@warning.likely(  # a token of a vocabulary beyond 256 bytes has more than one byte on average
    "val/bits_per_byte counts a token as a byte",
    "divide by the bytes of the validation text, not by its tokens",
    "val/bits_per_byte against val/loss",
)
def bits_per_token(run: Observed) -> str | None:
    bits, loss, largest = run.last("val/bits_per_byte"), run.last("val/loss"), run.last("health/largest_id")
    if bits is None or loss is None or (largest or 0.0) < 512:  # ids of bytes are smaller
        return None
    if abs(bits * math.log(2) - loss) > 1e-4 * loss:
        return None
    return f"val/bits_per_byte is {bits:.4f}, which is val/loss {loss:.4f} in bits, although ids go up to {largest:,.0f}"


@warning.likely(  # the average gives the first weights a share of decay^steps
    "validation is of an average of the weights that still has much of the first ones, or does not follow them",
    "--ema.warmup true, or a smaller --ema.decay",
    "val/loss against train/loss",
    explains=JUDGED,
)
def average_lags(run: Observed) -> str | None:
    decay, steps = run.number("ema.init_args.decay"), run.planned_steps
    pairs = _evaluated_again(run) if run.setting("ema") else []
    if pairs and run.is_complete and pairs[-1][1] - pairs[-1][2] > max(0.5, 0.25 * pairs[-1][2]):
        return f"val/loss of the average is {pairs[-1][1]:.3f} at last; sequences of its first batch have {pairs[-1][2]:.3f}"
    if decay is None or not 0 < decay < 1 or steps is None or run.setting("ema.init_args.warmup", True):
        return None
    if decay**steps < 0.05:
        return None
    return f"after {steps:,} steps an average with decay {decay:g} still is {decay**steps:.0%} the initial weights"

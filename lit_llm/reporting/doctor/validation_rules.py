"""Rules of `doctor` about the validation data and the validation loss."""

from __future__ import annotations

import math
import statistics

from lit_llm.reporting.doctor.finding import JUDGED, SLOW, UNSTABLE, error, warning
from lit_llm.reporting.doctor.observed import Observed


@error.certain(  # two evaluations of the same batch
    "dropout or other noise is on in validation: the model is not in eval mode",
    "module.eval() before validation; remove module.train() from validation_step",
    "health/validation_noise",
    explains=(*JUDGED, "future-leak"),
)
def validation_is_random(run: Observed) -> str | None:
    largest = max(run.values("health/validation_noise", least=1))
    return f"two evaluations of the same batch differ by {largest:.1%} of the largest logit" if largest > 0.01 else None


@warning.certain(  # the shapes of the batches
    "validation has other sequences than training, so that its loss is of less context",
    "the same block_size in training and validation",
    "health/validation_length",
    explains=JUDGED,
)
def validation_sequences_shorter(run: Observed) -> str | None:
    ratios = run.values("health/validation_length", least=2)
    if max(ratios) > 0.7:  # a batch may be padded to less
        return None
    return f"a sequence of validation has {max(ratios):.2f} times the tokens of training's, or less"


@error.certain(  # the definition of next-token prediction
    "inputs and targets of validation do not belong together: shifted once too often or not at all, or some of either replaced",
    "look at a batch of the validation data, beside one of training (`check --show 2`)",
    "health/validation_shifted_targets",
    explains=JUDGED,
)
def validation_targets_unrelated(run: Observed) -> str | None:
    share = run.median("health/validation_shifted_targets")
    return None if share > 0.9 else f"only {share:.1%} of the counted targets of validation are the next input"


@warning.likely(
    "the validation text is of another kind than the training text, or one of them was changed, or encoded otherwise",
    "split one text by document (`prepare --data.val_fraction 0.1`)",
    "health/validation_bigram_loss against health/bigram_loss",
    explains=("validation-differs", "over-fitting"),
)
def validation_other_text(run: Observed) -> str | None:
    """Return a sentence if counts of token pairs in training text predict validation text much worse than training text."""
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
    if not run.from_scratch or (share := run.recent("health/validation_unseen")) < 0.01:
        return None
    return f"{share:.1%} of the targets of validation never were targets of training"


@warning.likely(
    "the training text has random tokens, all along or for a while, or is much harder to predict than the validation text",
    "look at decoded batches of the training data (`check --show 100`)",
    "health/bigram_loss against health/validation_bigram_loss",
    explains=(*SLOW, *UNSTABLE, *JUDGED, "tokens-shuffled"),
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


@warning.possible(
    "validation and training measure different things: the mode, the mask, padding, noise, the weights or the metric differ",
    "evaluate one training batch in both ways, and compare",
    "val/loss against train/loss",
    explains=("over-fitting",),
)
def validation_differs(run: Observed) -> str | None:
    """Return a sentence if validation and training loss differ more than a bigram predictor's losses on both texts do."""
    curve, train = run.finite("val/loss", least=2), run.smoothed("train/loss", least=1)
    if run.points("train/margin") or (run.passes or 0.0) > 3 or not run.is_complete:
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
    """Return (loss on training text, loss on validation text) of a predictor that counts token pairs in the training text.

    None: pairs predict hardly better than single tokens, or training did not start from random weights.
    """
    if not run.from_scratch:
        return None
    of_training, of_validation = run.recent("health/bigram_loss"), run.recent("health/validation_bigram_loss")
    single = run.recent("health/unigram_loss")
    return (of_training, of_validation) if min(of_training, of_validation) < 0.9 * single else None

"""Rules about batches, targets and text."""

from __future__ import annotations

import math
import statistics

from lit_llm.reporting.doctor.finding import error, warning
from lit_llm.reporting.doctor.observed import Observed

_TARGETS = (
    "loss-stuck", "loss-too-low", "loss-spikes", "diverged", "validation-unlike-training", "over-fitting",
    "learning-rate-too-high",
)  # fmt: skip
"""What follows from wrong targets."""


def _shifted(run: Observed) -> float | None:
    return run.median("health/shifted_targets")


@error(
    "targets-not-shifted",
    "the targets are the inputs: the model learns to copy",
    "targets[t] = inputs[t + 1]; shift them once, in the data or in the loss",
    "health/copied_targets, a batch of the data",
    "certain",  # the definition of next-token prediction
    explains=_TARGETS,
)
def copied(run: Observed) -> str | None:
    share, shifted = run.median("health/copied_targets"), _shifted(run)
    if share is not None and shifted is not None and share > 0.95 and shifted < 0.9:
        return f"{share:.1%} of the targets are the input at their own position"
    return None


@error(
    "targets-shifted-twice",
    "the targets are shifted in the data and again in the loss",
    "shift the targets once, in the data or in the loss",
    "health/twice_shifted_targets, a batch of the data",
    "certain",  # the definition of next-token prediction; Hugging Face models shift labels themselves
    explains=_TARGETS,
)
def shifted_twice(run: Observed) -> str | None:
    share, shifted = run.median("health/twice_shifted_targets"), _shifted(run)
    if share is not None and shifted is not None and share > 0.95 and shifted < 0.9:
        return f"{share:.1%} of the targets are the input two positions on"
    return None


@error(
    "targets-unrelated",
    "the targets do not belong to their inputs: they were shuffled, or batches were mixed up",
    "look at a batch of the data",
    "health/shifted_targets",
    "certain",  # the definition of next-token prediction
    explains=_TARGETS,
)
def unrelated(run: Observed) -> str | None:
    shifted = _shifted(run)
    if shifted is None or shifted > 0.9 or copied.seen(run) or shifted_twice.seen(run):
        return None
    return f"only {shifted:.1%} of the counted targets are the next input"


@error(
    "future-leak",
    "a position sees later positions: the attention mask is missing or wrong",
    "is_causal=True, or a mask that is lower triangular",
    "health/future_leak",
    "certain",  # logits before a changed input must not change
    explains=("loss-too-low", "validation-unlike-training", "over-fitting", "diverged"),
)
def leak(run: Observed) -> str | None:
    change = run.median("health/future_leak")
    if change is not None and change > 0.02:
        return f"other inputs in the second half of a sequence changed the logits of its first half by {change:.1%} (median)"
    return None


@warning(
    "targets-ignored",
    "most positions do not count, so that most of the compute is wasted",
    "look at the masks of the data; --data.packing best_fit if it is padding",
    "health/ignored_targets, a batch of the data",
    "likely",
    explains=("loss-stuck", "loss-not-finite"),
)
def ignored(run: Observed) -> str | None:
    share = run.median("health/ignored_targets")
    chats = str(run.setting("data.class_path", "")).endswith("ChatFiles")
    if share is None or share <= 0.5 or chats or not run.from_scratch:  # fine-tuning trains on answers only
        return None
    return f"{share:.1%} of the targets are ignored (-100)"


def _repeated(run: Observed, tag: str) -> float | None:
    """A share of text that had occurred before, while less than one pass over the data was made. None if that is unknown."""
    rows = [value for step, value in run.finite(tag) if step > 1 and (run.passes_at(step) or math.inf) < 1]
    return statistics.median(rows[len(rows) // 2 :]) if rows else None


@error(
    "batch-repeated",
    "every step trains on the same sequences",
    "look at the sampler: it must advance, and differ between ranks",
    "health/repeated_samples",
    "certain",  # hashes of the sequences
    explains=("loss-too-low", "over-fitting", "duplicated-data", "validation-unlike-training"),
)
def one_batch(run: Observed) -> str | None:
    share = _repeated(run, "health/repeated_samples")
    if share is not None and share > 0.95:
        return f"{share:.0%} of the sequences had occurred before, although the first pass over the data is not complete"
    return None


@warning(
    "duplicated-data",
    "the training text has copies, or a template that recurs",
    "remove copies (`clean --near_duplicates 0.7`)",
    "health/repeated_spans, health/repeated_samples",
    "possible",  # Lee et al. 2022, Deduplicating training data makes language models better
    explains=("over-fitting", "loss-too-low"),
)
def duplicates(run: Observed) -> str | None:
    share = _repeated(run, "health/repeated_spans")
    mixed = str(run.setting("data.class_path", "")).endswith("Mixture")  # repeats small sources on purpose
    if share is not None and share > 0.25 and not mixed and one_batch.seen(run) is None:
        return f"{share:.0%} of the spans of tokens had occurred before, although the first pass over the data is not complete"
    return None


@error(
    "validation-in-training",
    "the validation text is in the training text, so that validation loss says nothing",
    "split by document before copies are made (`clean`, `prepare --data.val_fraction 0.1`)",
    "health/validation_overlap",
    "likely",  # spans of tokens that occur in both, and once in the validation text
    explains=("duplicated-data",),
)
def overlap(run: Observed) -> str | None:
    share = run.last("health/validation_overlap")
    passes = run.passes_at(run.step - run.start_of_launch(run.step))  # each launch counts anew
    if share is None or passes is None or passes <= 0:
        return None
    # Code repeats lines. With documents split at random, 11 % of the spans of Python's library (48 bytes) occur in a tenth of a
    # pass, 20 % in a whole one. Of a text that is all in training, 30 % occur in a pass of 0.3.
    if share > 0.3:
        return f"{share:.1%} of the validation text occurred in training, in {passes:.2f} passes over the training text"
    return None


@warning(
    "data-too-small",
    "the run repeats its text more often than helps",
    "fewer steps, a smaller model, or more text",
    "setup/train_tokens, progress/tokens, val/loss",
    "certain",  # Muennighoff et al. 2023: up to four passes are nearly as good as new text
    explains=("over-fitting", "duplicated-data", "batch-repeated", "loss-too-low"),
)
def small_data(run: Observed) -> str | None:
    if run.passes is not None and run.passes > 5:
        return f"the run has made {run.passes:.1f} passes over {run.last('setup/train_tokens'):,.0f} tokens"
    return None


@error(
    "data-damaged",
    "a shard changed after it was written",
    "prepare the data again (`prepare --replace true`)",
    "meta.json of the folder of shards",
    "certain",  # the hash of each shard in meta.json
    explains=("loss-spikes", "diverged", "loss-not-finite", "duplicated-data"),
)
def damaged(run: Observed) -> str | None:
    if not run.damages:
        return None
    first, *others = run.damages
    return first + (f", and {len(others)} more" if others else "")


@warning(
    "vocabulary-unused",
    "the vocabulary is not that of the text's tokenizer",
    "remove --model.vocab_size, or use the tokenizer that the text was prepared with",
    "health/untouched_embeddings",
    "likely",
)
def unused_vocabulary(run: Observed) -> str | None:
    shares, progress = run.finite("health/untouched_embeddings"), run.finite("progress/tokens")
    size = run.last("setup/vocab_size")
    if not shares or not progress or not progress[-1][0] or size is None:
        return None
    step, share = min(shares, key=lambda point: (point[1], -point[0]))  # each launch counts anew
    tokens = (step - run.start_of_launch(step)) * progress[-1][1] / progress[-1][0]
    # A text of as many tokens as a vocabulary of its own has entries uses more than a hundredth of them.
    if size > 512 and ((share > 0.9 and tokens > 5 * size) or (share > 0.99 and tokens > size)):
        return f"{share:.1%} of the {size:,.0f} embeddings were never used in {tokens:,.0f} tokens"
    return None

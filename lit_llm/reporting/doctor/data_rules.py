"""Rules of `doctor` about batches, targets and text."""

from __future__ import annotations

import statistics

from lit_llm.reporting.doctor.finding import JUDGED, ROUGH, SLOW, error, warning
from lit_llm.reporting.doctor.observed import Observed, Unjudged

_TARGETS = (*SLOW, *ROUGH, "loss-too-low", *JUDGED, "tokens-shuffled", "validation-targets-unrelated")
"""Names of findings that follow from wrong targets."""


def _are_inputs(run: Observed, tag: str, where: str) -> str | None:
    """Return a sentence if over 95 % of the targets equal the input at a wrong place, and fewer than 90 % the next input.

    `tag`: curve with the share of targets that equal the input at this place. `where`: the place in words. None: no fault."""
    share, shifted = run.median(tag), run.median("health/shifted_targets")
    return f"{share:.1%} of the targets are the input {where}" if share > 0.95 and shifted < 0.9 else None


@error.certain(  # the definition of next-token prediction
    "the targets are the inputs: the model learns to copy",
    "targets[t] = inputs[t + 1]; shift them once, in the data or in the loss",
    "health/copied_targets, a batch of the data",
    explains=_TARGETS,
)
def targets_not_shifted(run: Observed) -> str | None:
    return _are_inputs(run, "health/copied_targets", "at their own position")


@error.certain(  # the definition of next-token prediction; Hugging Face models shift labels themselves
    "the targets are shifted in the data and again in the loss",
    "shift the targets once, in the data or in the loss",
    "health/twice_shifted_targets, a batch of the data",
    explains=_TARGETS,
)
def targets_shifted_twice(run: Observed) -> str | None:
    return _are_inputs(run, "health/twice_shifted_targets", "two positions on")


@error.certain(  # the definition of next-token prediction
    "inputs and targets do not belong together: some of either were replaced, masked, shuffled or of another sequence",
    "look at a batch of the data (`check --show 2`)",
    "health/shifted_targets",
    explains=_TARGETS,
)
def targets_unrelated(run: Observed) -> str | None:
    shifted, rows = run.median("health/shifted_targets"), run.values("health/shifted_targets", -1)
    if targets_not_shifted.applies(run) or targets_shifted_twice.applies(run):
        return None
    if shifted <= 0.9:
        return f"only {shifted:.1%} of the counted targets are the next input"
    odd = [share for share in rows if share < 0.9]
    if len(odd) < max(2, 0.05 * len(rows)) or run.median("health/ignored_targets", default=0.0) > 0.5:  # shares of few targets
        return None
    return f"in {len(odd)} of {len(rows)} rows as few as {min(odd):.1%} of the targets are the next input"


@warning.certain(  # the target after a sequence is the first token of the next one
    "the sequences of a batch are consecutive text: training reads the data in order",
    "shuffle the samples",
    "health/consecutive_sequences",
    explains=(*ROUGH, "over-fitting", "validation-other-text"),
)
def samples_not_shuffled(run: Observed) -> str | None:
    share = run.median("health/consecutive_sequences")
    if share < 0.9 or run.last("health/commonest_target", 0.0) > 0.5:
        return None
    return f"{share:.0%} of the sequences continue the one before them in their batch"


@error.likely(  # in English a letter halves the uncertainty about the next one (Shannon 1951)
    "a token says nothing about the next one: tokens of the text are out of order, or random on some ranks",
    "look at a batch of the data, decoded (`check --show 2`)",
    "health/bigram_loss, health/unigram_loss",
    explains=(*SLOW, "validation-other-text"),
)
def tokens_shuffled(run: Observed) -> str | None:
    pairs, single = run.recent("health/bigram_loss"), run.recent("health/unigram_loss")
    if single < 1 or pairs < 0.95 * single or not run.last("setup/vocab_size"):
        return None
    return f"counting pairs of tokens predicts the next one no better ({pairs:.2f} nats) than counting tokens ({single:.2f})"


@warning.likely(
    "most targets are the same token, such as padding that counts",
    "give padding the target -100",
    "health/commonest_target",
    explains=(*SLOW, "loss-too-low", "positions-alike", "duplicated-data"),
)
def one_token_dominates(run: Observed) -> str | None:
    share = run.last("health/commonest_target")
    return f"{share:.0%} of the targets are one and the same token" if share > 0.5 else None


@warning.certain(  # ids are compared with the tokenizer's
    "the vocabulary is too small for the text, or of another text: characters become the unknown token",
    "a larger vocabulary (--data.tokenizer.vocab_size), or a tokenizer that has all bytes",
    "health/unknown_tokens",
    explains=(*SLOW, "loss-too-low", "one-token-dominates", "validation-other-text"),
)
def unknown_tokens(run: Observed) -> str | None:
    share = run.last("health/unknown_tokens", 0.0)  # a tokenizer without an unknown token logs no curve
    return f"{share:.1%} of the inputs are the unknown token" if share > 0.02 else None


@warning.likely(  # every input but the first was the target of the input before it
    "a token of the text never is a target that counts: a mask takes it for padding, or leaves it out",
    "give padding an id of its own; look at the targets of a decoded batch (`check --show 2`)",
    "health/unlearned_inputs",
    explains=(*JUDGED, "targets-ignored"),
)
def token_never_learned(run: Observed) -> str | None:
    share = run.median("health/unlearned_inputs", run.step // 2)
    ignored = run.median("health/ignored_targets")
    if share < 0.01 or not 0.5 < ignored / share < 2:  # else other targets are ignored, too
        return None
    return f"{share:.1%} of the inputs are tokens that never were counted targets"


@warning.likely(  # tokens are compared; forms, tables and pictures are alike on purpose
    "sequences share a part: a header, notice or template is repeated in all of them, or rows are padded alike",
    "remove it from the text (`clean`), or give it the target -100",
    "health/equal_columns, a decoded batch of the data",
    explains=("duplicated-data", "validation-other-text", "validation-differs", "loss-too-low"),
)
def positions_alike(run: Observed) -> str | None:
    share, ignored = run.median("health/equal_columns"), run.median("health/ignored_targets", default=0.0)
    if not 0.15 < share < 1 or ignored > share / 2 or not run.from_scratch or batch_repeated.applies(run):
        return None
    return f"at {share:.0%} of the positions all sequences of a micro-batch have the same token"


@error.certain(  # hashes of the sequences
    "all ranks train on the same samples",
    "give each rank samples of its own (DistributedSampler, or the rank in the seed of the order)",
    "health/shared_samples",
    explains=("duplicated-data", "batch-repeated"),
)
def ranks_share_data(run: Observed) -> str | None:
    if run.last("setup/ranks", 1.0) < 2:
        return None
    share = run.median("health/shared_samples")
    return f"{share:.0%} of the ranks begin a micro-batch with the sequence of another rank" if share > 0.5 else None


@error.certain(  # logits before a changed input must not change
    "a position sees later positions: a mask is missing or wrong, or a transpose, a sort or a convolution mixes positions",
    "is_causal=True, or a mask that is lower triangular; look at what reorders tokens",
    "health/future_leak",
    explains=("loss-too-low", *JUDGED, "diverged"),
)
def future_leak(run: Observed) -> str | None:
    changes = run.values("health/future_leak", least=1)
    leaks = [change for change in changes if change > 0.02]
    # Some leaks appear at some positions only. Rounding may send a token to other experts, so that its logits differ.
    few = len(changes) / (2 if run.setting("model.moe") else 10)
    if len(leaks) < max(min(2, len(changes)), few):
        return None
    rows = f"{len(leaks)} of {len(changes)} rows"
    return f"other inputs from a place on changed logits before it by up to {max(leaks):.1%}, in {rows}"


@warning.likely(
    "most positions do not count, so that most of the compute is wasted",
    "a larger --data.block_size if conversations are cut; --data.packing best_fit if it is padding; look at the data's masks",
    "health/ignored_targets, a batch of the data",
    explains=(*SLOW, "loss-not-finite", "gradients-vanish", "parameters-not-trained"),
)
def targets_ignored(run: Observed) -> str | None:
    share = run.median("health/ignored_targets")
    most = 0.5 if run.from_scratch and not _has_chats(run) else 0.98  # fine-tuning trains on answers only
    return f"{share:.1%} of the targets are ignored (-100)" if share > most else None


@error.certain(  # the template was asked
    "the chat template leaves out what the user says, so that answers cannot be predicted",
    "another template (--data.chat_template)",
    "chat_template.jinja in the run folder",
    explains=("over-fitting", "loss-stuck"),
)
def question_lost(run: Observed) -> str | None:
    return "the template writes a question and an answer without the question" if run.question and not run.question[0] else None


@warning.certain(  # the template was asked
    "the chat template marks the user's turns as the assistant's, so that questions are learned, too",
    "{% generation %} around the assistant's turns only",
    "chat_template.jinja in the run folder",
)
def questions_learned(run: Observed) -> str | None:
    return "the question of a user is marked as an answer" if run.question and run.question[1] else None


@warning.likely(  # a template ends all turns alike
    "answers end without the token that ends a turn, so that generation will not stop",
    "count the token that ends a turn: inside of {% generation %}",
    "health/answer_ends, chat_template.jinja in the run folder",
)
def answers_without_end(run: Observed) -> str | None:
    if not _has_chats(run) or (share := run.median("health/answer_ends")) > 0.3:  # turns may end in two ways
        return None
    return f"the commonest last token of answers ends {share:.0%} of them"


def _has_chats(run: Observed) -> bool:
    return str(run.setting("data.class_path", "")).endswith("ChatFiles")


def _repeated(run: Observed, tag: str) -> list[tuple[float, float]]:
    """Return (passes over the data from the start of the row's launch, share of repeated text that `tag` logs) for each row
    in the first pass of a launch."""
    if run.passes is None:
        raise Unjudged("setup/train_tokens")
    launches = [(step - run.start_of_launch(step), value) for step, value in run.finite(tag, least=1) if step > 1]
    rows = [(run.passes_at(steps) or 0.0, value) for steps, value in launches]  # each launch counts repeats from zero
    return [(passes, value) for passes, value in rows if passes < 1]


@error.likely(  # hashes of the sequences. By chance, most of a quarter of a text has been read before only if it has 20 copies
    "the same sequences are read again and again: only a part of the data is read, its position does not advance or was not "
    "restored, or rows or workers share it",
    "look at the sampler: it must advance, and differ between ranks and workers",
    "health/repeated_samples",
    explains=(*JUDGED, "loss-too-low", "duplicated-data", "validation-other-text"),
)
def batch_repeated(run: Observed) -> str | None:
    early = [share for passes, share in _repeated(run, "health/repeated_samples") if passes < 0.25]
    again = [share for share in early if share > 0.95]
    if len(again) < 2:
        return None
    return (
        f"in {len(again)} of {len(early)} rows of the first quarter of a pass, all sequences had occurred before in this launch"
    )


@warning.possible(  # Lee et al. 2022, Deduplicating training data makes language models better
    "the training text has copies, or a template that recurs",
    "remove copies (`clean --near_duplicates 0.7`)",
    "health/repeated_spans, health/repeated_samples",
    explains=("over-fitting", "loss-too-low", "validation-other-text"),
)
def duplicated_data(run: Observed) -> str | None:
    mixed = str(run.setting("data.class_path", "")).endswith("Mixture")  # repeats small sources on purpose
    if mixed or not run.from_scratch or batch_repeated.applies(run):
        return None
    rows = [share for _, share in _repeated(run, "health/repeated_spans")]
    share = statistics.median(rows[len(rows) // 2 :] or [0.0])
    if share > 0.25:
        return (
            f"{share:.0%} of the spans of tokens had occurred before in this launch, which has not made one pass over the data"
        )
    return None


@error.likely(  # spans of tokens that occur in both, and once in the validation text
    "the validation text is in the training text, so that validation loss says nothing",
    "split by document before copies are made (`clean`, `prepare --data.val_fraction 0.1`)",
    "health/validation_overlap",
    explains=("duplicated-data",),
)
def validation_in_training(run: Observed) -> str | None:
    share = run.last("health/validation_overlap")
    passes = run.passes_at(run.step - run.start_of_launch(run.step))  # each launch counts overlaps from zero
    if not passes:
        raise Unjudged("setup/train_tokens")
    # Code repeats lines. With documents split at random, 11 % of the spans of Python's library (48 bytes) occur in a tenth of a
    # pass, 20 % in a whole one. If all of the validation text is in training, 40 % of its spans occur in 0.4 passes.
    # Answers and templates of conversations recur: 68 % of the spans occur, even if validation has other questions.
    if share > (0.4 if run.from_scratch else 0.9):
        return f"{share:.1%} of the validation text occurred in training, in {passes:.2f} passes over the training text"
    return None


@warning.likely(  # Muennighoff et al. 2023: up to four passes are nearly as good as new text
    "the run repeats its text more often than helps",
    "fewer steps, a smaller model, or more text",
    "setup/train_tokens, progress/tokens, val/loss",
    explains=("over-fitting", "duplicated-data", "batch-repeated", "loss-too-low"),
)
def data_too_small(run: Observed) -> str | None:
    if run.passes is None:
        raise Unjudged("setup/train_tokens")
    if run.passes > 5 and run.from_scratch:
        return f"the run has made {run.passes:.1f} passes over {run.last('setup/train_tokens'):,.0f} tokens"
    return None


@error.certain(  # the hash of each shard in meta.json
    "a shard changed after it was written",
    "prepare the data again (`prepare --replace true`)",
    "meta.json of the folder of shards",
    explains=(*ROUGH, "duplicated-data"),
)
def data_damaged(run: Observed) -> str | None:
    if not run.damages:
        return None
    first, *others = run.damages
    return first + (f", and {len(others)} more" if others else "")


@warning.likely(
    "the vocabulary is not that of the text's tokenizer, or ids were cut, as by an integer type that is too small",
    "remove --model.vocab_size, or use the tokenizer that the text was prepared with; look at the largest id of the data",
    "health/untouched_embeddings",
)
def vocabulary_unused(run: Observed) -> str | None:
    if not run.from_scratch:  # imported weights bring their own vocabulary
        return None
    shares, size = run.finite("health/untouched_embeddings", least=1), run.last("setup/vocab_size")
    if (each_step := run.tokens_per_step) is None:
        raise Unjudged("progress/tokens")
    step, share = min(shares, key=lambda point: (point[1], -point[0]))  # each launch counts used embeddings from zero
    tokens = (step - run.start_of_launch(step)) * each_step
    largest = max(run.values("health/largest_id", 0), default=0.0)
    if largest in (255, 65535) and size > 1.5 * largest and tokens > 20 * largest:  # largest numbers of 8 and of 16 bits
        return f"no id was larger than {largest:,.0f} in {tokens:,.0f} tokens, although there are {size:,.0f} embeddings"
    # A text of as many tokens as a vocabulary of its own has entries uses more than a hundredth of them.
    if size > 512 and ((share > 0.9 and tokens > 5 * size) or (share > 0.99 and tokens > size)):
        return f"{share:.1%} of the {size:,.0f} embeddings were never used in {tokens:,.0f} tokens"
    return None

"""Rules of `doctor` about training and validation loss, and about initial or loaded weights."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect
from collections.abc import Sequence

from lit_llm.reporting.doctor.finding import JUDGED, ROUGH, SLOW, error, warning
from lit_llm.reporting.doctor.observed import Observed, Unjudged, medians

WIDE = 0.2
"""Limit of the increase of (validation loss - training loss) in a run that repeats its text, over the validation loss."""
MOST_WINDOWS = 500
"""The approximate largest number of rows from which the rule `diverged` takes medians. A longer curve is thinned."""
LARGEST_GAIN = 3.0
"""Limit of an initial matrix's gain: root mean square of its elements times √(number of inputs). GPT-3's standard deviation of
0.02 at width 12,288 gives a gain of 2.2, torch's Linear 0.6."""


@error.likely(  # Micikevicius et al. 2018, Mixed precision training
    "numbers exceed fp16's largest, 65,504",
    "--trainer.precision bf16-mixed",
    "grad/norm, health/activation_max, health/logit_max",
    explains=(*SLOW, *ROUGH),
)
def fp16_overflow(run: Observed) -> str | None:
    if not str(run.setting("trainer.precision", "")).startswith("16"):
        return None
    norms = run.points("grad/norm")
    if not norms:
        raise Unjudged("grad/norm")
    late = [step for step, norm in norms if not math.isfinite(norm) and step > max(20, run.step // 10)]
    if len(late) >= max(2, 0.02 * len(norms)):  # the scaler tries larger scales now and then
        return f"gradients were infinite in {len(late):,} rows, at first after the search for a scale at step {late[0]:,}"
    return loss_not_finite.seen(run)


@error.likely(  # the usual first symptom of divergence
    "the learning rate is too high, a value overflowed, or a mean over no targets divides by zero",
    "a third of the learning rate, more warmup (--schedule.warmup_steps); continue from the last good checkpoint",
    "grad/norm and health/activation_max before that step",
    explains=("loss-spikes", "guard-too-strict", "large-logits", "gradient-norm-rises", "clipped-at-every-step"),
)
def loss_not_finite(run: Observed) -> str | None:
    if not run.points("train/loss"):
        raise Unjudged("train/loss")
    for tag in ("train/loss", "val/loss"):
        bad = [step for step, value in run.points(tag) if not math.isfinite(value)]
        if bad:
            return f"{tag} is not a number at step {bad[0]:,} and in {len(bad):,} of {len(run.points(tag)):,} rows"
    norms = run.points("grad/norm")
    bad = [step for step, norm in norms if not math.isfinite(norm)]
    scaled = str(run.setting("trainer.precision", "16")).startswith("16")  # overflows belong to the search for a scale
    if bad and not scaled and (bad[-1] == norms[-1][0] or len(bad) > 0.05 * len(norms)):
        return f"grad/norm is not a number at step {bad[0]:,} and in {len(bad):,} of {len(norms):,} rows"
    return None


def scatter(values: Sequence[float]) -> float:
    """Return the standard deviation of a curve's values around its trend, from the median difference between neighbours."""
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    return 1.4826 * statistics.median(steps) / math.sqrt(2) if steps else 0.0


@error.likely(  # the loss of equal logits is ln(vocabulary); Karpathy 2019, A recipe for training neural networks
    "the initial weights are too large",
    "--model.init_std 0.02, or remove the setting",
    "setup/initial_gain, health/logit_rms and health/activation_rms at step 1",
    explains=(*SLOW, *ROUGH, "no-context"),
)
def initial_weights(run: Observed) -> str | None:
    if not run.from_scratch:
        return None
    gain = run.last("setup/initial_gain", 0.0)
    if gain > LARGEST_GAIN:
        return f"a weight matrix enlarged random inputs {gain:.1f} times when training started (usual: 0.1 to 2 times)"
    (step, loss), uniform = run.finite("train/loss", least=1)[0], run.uniform_loss
    if step == 1 and loss > 1.15 * uniform + 0.3:
        return f"the first loss is {loss:.3f}, but a model that knows nothing has ln(vocabulary) = {uniform:.3f}"
    return None


@error.likely(  # a trained model is better than a uniform prediction
    "the weights that training starts from do not fit the data: another tokenizer, or layers that were not loaded",
    "the tokenizer of these weights; compare names and shapes of what was loaded",
    "train/loss of step 1, setup/fresh_matrices",
    explains=(*SLOW, *ROUGH, "over-fitting"),
)
def loaded_weights_unfit(run: Observed) -> str | None:
    if run.setting("init_from") is None:
        return None
    fresh = run.last("setup/fresh_matrices", 0.0)
    if fresh > 0.9:
        return f"before step 1 {fresh:.0%} of the kinds of matrices in blocks looked like random draws"
    (step, loss), uniform = run.finite("train/loss", least=1)[0], run.uniform_loss
    if step > 1 or run.points("train/margin") or loss < uniform:
        return None
    return f"the first loss is {loss:.3f}; without any knowledge it is ln(vocabulary) = {uniform:.3f}"


@error.likely(  # equal units get equal gradients; Glorot and Bengio 2010
    "the initial weights are far too small, or units begin with equal weights",
    "--model.init_std 0.02, or remove the setting; draw weights at random",
    "setup/initial_gain, setup/alike_units",
    explains=(*SLOW, "learning-rate-too-high", "no-context"),
)
def initial_weights_small(run: Observed) -> str | None:
    if not run.from_scratch:
        return None
    gain, alike = run.last("setup/initial_gain"), run.last("setup/alike_units", 0.0)
    if dict(run.finite("health/weight_norm/embedding")).get(1) == 0:
        return "the embedding began at zero, so that the blocks saw nothing"
    if alike:
        return f"in {alike:.0%} of the matrices all units began with the same weights"
    if gain < 0.02:
        return f"no weight matrix kept more than {gain:.1%} of random inputs when training started (usual: 10 to 200 %)"
    return None


@error.possible(
    "training is unstable: the learning rate is too high, or the data, the gradients or the weights change at that step",
    "a third of the learning rate, or more warmup (--schedule.warmup_steps); look at the batches of that step",
    "grad/norm, health/update_ratio",
    explains=("loss-spikes", "guard-too-strict"),
)
def diverged(run: Observed) -> str | None:
    rows = run.finite("train/loss", least=9)
    curve = rows[:: 1 + len(rows) // MOST_WINDOWS]  # each window is sorted
    fifth = max(3, len(curve) // 5)
    values = [loss for _, loss in curve]
    medians = [(curve[i + fifth - 1][0], statistics.median(values[i : i + fifth])) for i in range(len(curve) - fifth + 1)]
    error = 1.25 * scatter(values) / math.sqrt(fifth)  # standard error of a median
    (step, end), (low_step, low) = medians[-1], min(medians, key=lambda point: point[1])
    # Not small fluctuations: a twentieth of the loss, 0.1 nats, and a sixth of what was learned.
    since = run.values("val/loss", after=low_step - 1)
    fell = len(since) > 1 and since[-1] <= since[0]  # on the same text, so it is no matter of batches
    if end - low > max(0.05 * low + 0.1, 0.15 * (values[0] - low), 5 * error) and not fell:
        return f"training loss rose from {low:.3f} at step {low_step:,} to {end:.3f} at step {step:,} (medians of {fifth} rows)"
    peak_step, peak = max(medians, key=lambda point: point[1])
    if peak - values[0] > max(0.15 * values[0], 5 * error + 3 * scatter(values)):
        return f"training loss rose from {values[0]:.3f} at first to {peak:.3f} at step {peak_step:,} (median of {fifth} rows)"
    return None


@error.possible(
    "the targets have nothing to do with the inputs, or the learning rate is much too low or too high",
    "look at a batch of the data (`check --show 2`); then try ten times the learning rate",
    "health/shifted_targets, health/update_ratio",
    explains=("under-fitting",),
)
def loss_stuck(run: Observed) -> str | None:
    if run.step < 100 or not run.learns_text:
        return None
    curve = run.smoothed("train/loss", least=8)
    first, end = run.finite("train/loss")[0][1], curve[-1][1]
    half = [loss for step, loss in curve if step > run.step / 2]
    if len(half) < 4:
        return None
    falls = statistics.mean(half[: len(half) // 2]) - statistics.mean(half[len(half) // 2 :])
    if end > 0.9 * first and falls < 0.01 * first and min(loss for _, loss in curve) > 0.8 * first:  # else it was better once
        return f"training loss went from {first:.3f} to {end:.3f} in {run.step:,} steps, and no longer falls"
    return None


@warning.possible(  # counted pairs of tokens predict as well as a model with one token of context
    "the model does not fit its training text: the learning rate is too low or too high, the model too small, or the steps "
    "are too few",
    "another learning rate (`find-lr`); a larger model (--model.n_embd, --model.n_layer); more tokens (--trainer.max_steps)",
    "train/loss against health/bigram_loss, health/update_ratio",
)
def under_fitting(run: Observed) -> str | None:
    """Return a sentence if the training loss is above the loss of a predictor that only counts pairs of tokens (bigrams), and
    no longer falls, although the learning rate is not yet small; else None."""
    rates, behind = dict(run.finite("lr")), run.behind_pairs
    least = 0.1 * max(rates.values(), default=0.0)
    rows = [(step, loss) for step, loss in run.finite("train/loss", least=40) if rates.get(step, 0.0) >= least]
    losses, validation = [loss for step, loss in rows if step > run.warmup_steps], run.values("val/loss")
    if len(losses) < 40 or behind is None or behind < 0.05 or not run.learns_text:  # text that pairs predict comes to 0
        return None
    _, middle, last = medians(losses, 3)
    falls = len(validation) > 2 and validation[-1] < 0.98 * validation[len(validation) // 2]  # the text of training may change
    if last < 0.975 * middle or falls:  # healthy runs that are as high: up to 0.958
        return None
    return f"training loss went from {middle:.3f} to {last:.3f} in two thirds of the steps; counted pairs of tokens give less"


@error.possible(  # the entropy of English is near 0.6 to 1.3 bits per character (Shannon 1951); a first pass does not reach it
    "the model sees its targets: labels are not shifted, the mask leaks, or the text repeats itself",
    "look at a batch of the data (`check --show 2`) and at the attention mask",
    "health/copied_targets, health/future_leak, health/repeated_samples",
)
def loss_too_low(run: Observed) -> str | None:
    if not run.from_scratch or (run.passes is not None and run.passes > 3):
        return None
    run.finite("train/loss", least=1)
    for tag in ("val/loss", "train/loss"):
        low = [(step, value) for step, value in run.finite(tag) if value < 0.3]
        if low and run.last("setup/vocab_size", 0.0) > math.exp(2):
            return f"{tag} fell to {low[0][1]:.3f} nats per token at step {low[0][0]:,}: text is not that predictable"
    return None


@warning.likely(  # standard; passes beyond four help little (Muennighoff et al. 2023)
    "the model learns the training text by heart: there is too little of it, or what it asks for does not follow from what it "
    "shows, such as answers of other questions",
    "stop earlier (the checkpoint `best`), give more text, or raise dropout or weight decay",
    "val/loss against train/loss",
)
def over_fitting(run: Observed) -> str | None:
    curve, train = run.finite("val/loss", least=3), run.smoothed("train/loss", least=1)
    if run.passes is not None and run.passes < 1:  # nothing was read twice
        return None
    low_step, low = min(curve, key=lambda point: point[1])
    step, end = min(curve[-2:], key=lambda point: point[1])  # a single validation may be higher by chance
    before = [loss for at, loss in train if at <= low_step] or [train[0][1]]
    said = f"from {low:.3f} at step {low_step:,} to {end:.3f} at step {step:,}, while training loss fell to {train[-1][1]:.3f}"
    if end > 1.02 * low and low_step < step and train[-1][1] < before[-1]:
        return f"validation loss rose {said}"
    if (run.passes or 0.0) < 1.5 or run.points("train/margin"):
        return None
    first_step, first = curve[0]
    half = next((loss for at, loss in reversed(curve) if at <= 0.7 * step), first)
    began = next((loss for at, loss in train if at >= first_step), train[0][1])
    opened = (end - train[-1][1]) - (first - began)  # how much further apart the losses are than at the first validation
    if end < 0.98 * half or opened < WIDE * end:
        return None
    return f"validation loss no longer falls ({half:.3f}, then {end:.3f}), while training loss fell to {train[-1][1]:.3f}"


@error.likely(
    "the validation text has another tokenizer or vocabulary than the training text",
    "prepare both splits with the same tokenizer (`prepare`)",
    "meta.json of both folders of shards; val/loss",
    explains=("over-fitting", "validation-other-text", "validation-differs"),
)
def validation_unlike_training(run: Observed) -> str | None:
    """Return a sentence if the training loss falls, but the validation loss never was clearly below ln(vocabulary size)."""
    curve, train, uniform = run.finite("val/loss", least=1), run.smoothed("train/loss", least=1), run.uniform_loss
    step, lowest = min(curve, key=lambda point: point[1])
    if lowest > 0.95 * uniform and train[-1][1] < 0.8 * uniform:
        return (
            f"validation loss was never below {lowest:.3f} (step {step:,}), which is not better than guessing "
            f"({uniform:.3f}), while training loss fell to {train[-1][1]:.3f}"
        )
    return None


def _standing_out(rows: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the rows (step, loss) far above their neighbours, both in nats and as a share of the loss; [] if these
    are a single row or under 1 % of the rows, or if there are under 14 rows.

    By nats alone, early rows would stand out if the loss comes near zero later, where it hardly fluctuates.
    """
    above, share = [], []  # how far each row is above the median of its four neighbours
    for i in range(2, len(rows) - 2):
        usual = statistics.median(rows[i + at][1] for at in (-2, -1, 1, 2))
        above.append(rows[i][1] - usual)
        share.append(above[-1] / usual if usual > 0 else 0.0)
    if len(above) < 10:
        return []  # too few rows to estimate their scatter
    nats, shares = (8 * 1.4826 * statistics.median(map(abs, values)) for values in (above, share))
    outliers = [rows[i + 2] for i in range(len(above)) if above[i] > max(nats, 0.1 * rows[i + 2][1]) and share[i] > shares]
    return outliers if len(outliers) >= max(2, 0.01 * len(rows)) else []


@warning.possible(  # Chowdhery et al. 2022, PaLM, 5.1
    "single batches are unlike the others, or the learning rate is near its limit",
    "look at the samples of the steps that the spike guard names; lower the learning rate if they are ordinary text",
    "spike/skipped, grad/norm",
)
def loss_spikes(run: Observed) -> str | None:
    outliers = _standing_out([row for row in run.finite("train/loss", least=1) if row[0] > run.warmup_steps])
    skipped = sum(run.values("spike/skipped", run.warmup_steps))
    if outliers:
        step, loss = outliers[0]
        return (
            f"{len(outliers):,} rows stand out of their neighbours (the first: {loss:.3f} at step {step:,}), {skipped:.0f} "
            "steps were skipped"
        )
    if skipped >= max(3, 0.02 * run.step):
        return f"{skipped:.0f} of {run.step:,} steps were skipped by the spike guard"
    return None


@error.likely(
    "the resumed run did not continue with the same model or data: weights, their order, a setting or the tokenizer differ",
    "compare what was saved with what was loaded, by name (--resume auto restores it); look at decoded batches",
    "train/loss at the step of the resume",
    explains=(*ROUGH, *JUDGED),
)
def loss_jumps_at_resume(run: Observed) -> str | None:
    rows = run.finite("train/loss", least=1)
    for first in (step for step in run.first_steps if step > 10):
        place = bisect(rows, (first, math.inf))
        before, after = ([loss for _, loss in part] for part in (rows[max(0, place - 6) : place], rows[place : place + 4]))
        rise = statistics.median(after) - statistics.median(before) if before and after else 0.0
        if len(before) == 6 and len(after) == 4 and rise > max(0.3, 4 * scatter(before + after)):
            return f"training loss rose by {rise:.2f} when the run was resumed at step {first:,} (usual: at most 0.1)"
    return None

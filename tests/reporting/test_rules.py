"""Each rule on curves that have its symptom, and on curves that do not."""

import math
import random
import re
import time
from pathlib import Path

import pytest

from lit_llm.reporting.doctor.diagnose import RULES, diagnose, examine
from lit_llm.reporting.doctor.observed import Observed
from lit_llm.runs.loaded_run import Series

PAGE = Path(__file__).parents[2] / "docs/reference/doctor-rules.md"
STEPS = range(10, 410, 10)
LAYERS = ("embedding", "blocks.0.attention", "blocks.0.mlp", "head")


def series(values) -> Series:
    """Values by step."""
    return Series(list(values), list(values.values()), [float(step) for step in values])


def healthy() -> dict[str, dict[int, float]]:
    """A run of 400 steps with 20 of warmup, of 256 tokens, whose loss falls from ln 256 to 2."""
    rate = {step: 0.01 * min(1.0, step / 20) * (1 - step / 500) for step in (1, *STEPS)}
    loss = {step: 2 + 3.5 * math.exp(-(step - 1) / 60) for step in (1, *STEPS)}
    curves = {
        "lr": rate,
        "train/loss": loss,
        "val/loss": {step: loss[step] + 0.1 for step in (100, 200, 300, 400)},
        "grad/norm": {step: 1.5 for step in loss},
        "grad/norm_clipped": {step: 1.0 for step in loss},
        "grad/clip_fraction": {step: 1.0 for step in loss},
        "spike/skipped": {step: 0.0 for step in loss},
        "progress/tokens": {step: 1000.0 * step for step in loss},
        "time/data_fraction": {step: 0.05 for step in STEPS},
        "setup/vocab_size": {0: 256.0},
        "setup/train_tokens": {0: 1e6},
        "setup/decayed_vectors": {0: 0.0},
        "setup/unoptimized": {0: 0.0},
        "setup/weight_decay": {0: 0.01},
        "setup/frozen": {0: 0.0},
        "setup/initial_gain": {0: 0.6},
    }
    constant = {
        "shifted_targets": 1.0, "copied_targets": 0.07, "twice_shifted_targets": 0.06, "ignored_targets": 0.0,
        "future_leak": 1e-7,
        "repeated_samples": 0.0, "repeated_spans": 0.1, "validation_overlap": 0.001, "untouched_embeddings": 0.5,
        "unigram_loss": 3.2, "bigram_loss": 2.4, "commonest_target": 0.1, "consecutive_sequences": 0.05, "context_use": 0.1,
        "zero_gradients": 0.01,
        "equal_columns": 0.02, "unknown_tokens": 0.0,
        "unlearned_inputs": 0.0,
        "validation_unseen": 0.0, "validation_bigram_loss": 2.5,
        "validation_noise": 1e-7, "validation_length": 1.0,
        "validation_shifted_targets": 1.0,
        "backward_loss_ratio": 1.0, "logit_max": 12.0, "dead_units/blocks.0": 0.02, "rank_difference": 0.0,
    }  # fmt: skip
    for name, value in constant.items():
        curves[f"health/{name}"] = {step: value for step in (1, *range(50, 410, 50))}
    for layer in LAYERS:
        curves[f"health/update_ratio/{layer}"] = {step: 0.01 for step in (1, *range(50, 410, 50))}
        curves[f"health/update_norm/{layer}"] = {step: 0.1 for step in (1, *range(50, 410, 50))}
        curves[f"health/weight_norm/{layer}"] = {step: 10.0 for step in (1, *range(50, 410, 50))}
    return curves


CONFIG = {
    "init_from": None,
    "trainer": {"max_steps": 400, "precision": "32-true"},
    "optimizer": {"init_args": {"betas": [0.9, 0.95]}},
    "gradient_norm": {"init_args": {"clip": 1.0}},
    "data": {"class_path": "lit_llm.data.TextFiles"},
}


def observed(changed=(), config=(), **facts) -> Observed:
    curves = healthy() | dict(changed)
    return Observed({tag: series(values) for tag, values in curves.items()}, CONFIG | dict(config), **facts)


def everywhere(tag: str, value: float) -> dict[str, dict[int, float]]:
    return {tag: dict.fromkeys(healthy().get(tag, STEPS), value)}


def layers(group: str, value: float) -> dict[str, dict[int, float]]:
    return {f"health/{group}/{layer}": dict.fromkeys(healthy()["health/logit_max"], value) for layer in LAYERS}


def loss(formula) -> dict[str, dict[int, float]]:
    return {"train/loss": {step: formula(step) for step in (1, *STEPS)}}


def with_precision(precision: str) -> dict[str, dict]:
    return {"trainer": {"max_steps": 400, "precision": precision}}


RANKS = {"setup/ranks": {0: 2.0}}
TUNED = layers("update_ratio", 1e-4)
CHATS = {"data": {"class_path": "lit_llm.data.ChatFiles"}}
MOE = {"model": {"moe": {"experts": 8, "top_k": 2}}}
MOVES = MOE | {"expert_balance": {"init_args": {"rate": 0.3}}}
BATCHES = {step: 2.4 - step / 1000 + (0.0 if step % 130 else 3.0) for step in STEPS}
FLAT = loss(lambda step: 5.5 - step / 16 if step < 40 else 3.0)
SLOW = loss(lambda step: 2.9 + 2.6 * math.exp(-step / 60))
OFTEN = range(5, 405, 5)
UNDER_FITTING = {
    "train/loss": {step: max(3.0, 5.5 - step / 16) for step in OFTEN},
    "lr": dict.fromkeys(OFTEN, 0.01),
    "grad/clip_fraction": dict.fromkeys(OFTEN, 0.1),
    "val/loss": dict.fromkeys((100, 200, 300, 400), 3.1),
    "health/counted_pairs": dict.fromkeys((1, *range(50, 410, 50)), 1e4),
}
CASES = {
    "loss-not-finite": [
        observed(loss(lambda step: math.nan if step > 200 else 3.0 - step / 200)),
        observed(
            {"grad/norm": {step: math.nan if step % 20 else 1.5 for step in STEPS}, "spike/skipped": dict.fromkeys(STEPS, 4.0)}
        ),
    ],
    "fp16-overflow": [
        observed({"grad/norm": {step: math.inf if step in (200, 300) else 1.0 for step in STEPS}}, with_precision("16-mixed")),
        observed(loss(lambda step: math.nan if step > 200 else 3.0 - step / 200), with_precision("16-true")),
    ],
    "initial-weights": [
        observed({"train/loss": healthy()["train/loss"] | {1: 20.0}}),
        observed({"setup/initial_gain": {0: 8.0}}),
    ],
    "diverged": [
        observed(
            loss(lambda step: 5.5 - step / 60 if step < 200 else 4.0) | {"val/loss": {100: 4.0, 200: 2.5, 300: 4.1, 400: 4.1}}
        ),
        observed(loss(lambda step: 5.5 + step / 100)),
    ],
    "loss-stuck": [observed(loss(lambda step: 5.5 if step < 20 else 5.2))],
    "under-fitting": [observed(UNDER_FITTING)],
    "loss-too-low": [observed({"val/loss": {100: 0.07, 200: 0.06, 300: 0.05, 400: 0.04}})],
    "over-fitting": [
        observed({"val/loss": {100: 3.0, 200: 2.5, 300: 2.7, 400: 2.9}, "setup/train_tokens": {0: 2e5}}),  # two passes
        observed(  # 3.7 passes; validation is flat
            loss(lambda step: 4.6 - 2.6 * step / 400)
            | {"val/loss": {100: 4.0, 200: 3.85, 300: 3.81, 400: 3.81}, "setup/train_tokens": {0: 1.08e5}}
        ),
    ],
    "validation-unlike-training": [observed({"val/loss": {100: 7.0, 200: 7.5, 300: 7.2, 400: 7.7}})],
    "loss-spikes": [observed({"train/loss": {1: 5.5, **BATCHES}}), observed(everywhere("spike/skipped", 1.0))],
    "parameters-not-trained": [
        observed(everywhere("setup/unoptimized", 64.0)),
        observed(everywhere("setup/frozen", 64.0)),
        observed({"health/update_norm/blocks.0.mlp": {1: 0.0, 50: 0.0, 100: 0.0}}),
    ],
    "updates-rounded-away": [observed(layers("update_ratio", 0.002), with_precision("bf16-true"))],
    "loss-scale": [observed(everywhere("health/backward_loss_ratio", 4.0))],
    "learning-rate-too-high": [
        observed(layers("update_ratio", 0.3) | SLOW),
        observed(
            {f"health/weight_norm/{layer}": {1: 2.0} | dict.fromkeys(range(30, 410, 50), 12.0) for layer in LAYERS}
            | layers("update_ratio", 0.05)
            | SLOW
        ),
        observed(layers("update_ratio", 0.2) | loss(lambda step: 2.5 - step / 1000), {"init_from": "runs/base"}),
    ],
    "learning-rate-too-low": [observed(layers("update_ratio", 0.001) | SLOW)],
    "clipped-at-every-step": [observed(FLAT)],
    "gradient-norm-rises": [observed({"grad/norm": {step: 0.5 * math.exp(max(0, step - 200) / 60) for step in STEPS}})],
    "decayed-vectors": [observed(everywhere("setup/decayed_vectors", 9.0) | everywhere("setup/weight_decay", 0.1))],
    "no-warmup": [observed({"lr": {step: 0.01 * (1 - step / 500) for step in (1, *STEPS)}})],
    "targets-not-shifted": [
        observed(everywhere("health/copied_targets", 1.0) | everywhere("health/shifted_targets", 0.07)),
    ],
    "targets-shifted-twice": [
        observed(everywhere("health/twice_shifted_targets", 1.0) | everywhere("health/shifted_targets", 0.07)),
    ],
    "targets-unrelated": [
        observed(everywhere("health/shifted_targets", 0.05)),
        observed({"health/shifted_targets": {step: 0.3 if step in (100, 250) else 1.0 for step in range(50, 410, 50)}}),
    ],
    "targets-ignored": [observed(everywhere("health/ignored_targets", 0.9))],
    "future-leak": [observed(everywhere("health/future_leak", 0.3))],
    "batch-repeated": [observed(everywhere("health/repeated_samples", 1.0))],
    "duplicated-data": [observed(everywhere("health/repeated_spans", 0.5))],
    "validation-in-training": [observed(everywhere("health/validation_overlap", 0.41))],
    "data-too-small": [observed(everywhere("setup/train_tokens", 2e4))],
    "data-damaged": [observed(damages=["shards/train.bin has another hash"])],
    "vocabulary-unused": [
        observed(
            everywhere("setup/vocab_size", 5000.0)
            | everywhere("health/untouched_embeddings", 0.95)
            | loss(lambda s: 8 - s / 80)
        ),
        observed(everywhere("setup/vocab_size", 1024.0) | {"health/largest_id": dict.fromkeys(STEPS, 255.0)}),
    ],
    "dead-units": [observed(everywhere("health/dead_units/blocks.0", 0.9))],
    "large-logits": [observed(everywhere("health/logit_max", 300.0))],
    "slow-loader": [observed(everywhere("time/data_fraction", 0.7))],
    "straggler": [
        observed(
            {
                "setup/ranks": {0: 2.0},
                "rank/straggler": dict.fromkeys(STEPS, 1.0),
                "rank/step_time_max": dict.fromkeys(STEPS, 0.2),
                "rank/step_time_mean": dict.fromkeys(STEPS, 0.1),
            }
        )
    ],
    "expert-bias-too-large": [
        observed(everywhere("experts/bias", 3.0), MOVES),
    ],
    "experts-unbalanced": [
        observed(everywhere("experts/dead", 2.0) | everywhere("experts/load", 2.0), MOE),
        observed(everywhere("experts/load", 3.5), MOE),
        observed(everywhere("experts/load", 2.1), MOE),  # from random weights
    ],
    "initial-weights-small": [
        observed(everywhere("setup/initial_gain", 1e-3)),
        observed({"setup/alike_units": {1: 0.2}}),
        observed({"health/weight_norm/embedding": {1: 0.0, 50: 10.0}}),
    ],
    "rate-rises-again": [observed({"lr": {step: 0.01 * (1 - step % 200 / 210) for step in (1, *STEPS)}})],
    "preference-leak": [observed(everywhere("train/accuracy", 1.0))],
    "likelihoods-fall": [
        observed(
            {
                "train/margin": {step: step / 400 for step in STEPS},
                "train/logp_chosen": {step: -100 - step / 10 for step in STEPS},
                "train/logp_rejected": {step: -100 - step / 5 for step in STEPS},
            }
            | TUNED
        )
    ],
    "ranks-differ": [observed(RANKS | everywhere("health/rank_difference", 1e-3))],
    "samples-not-shuffled": [observed(everywhere("health/consecutive_sequences", 1.0))],
    "tokens-shuffled": [observed(everywhere("health/bigram_loss", 3.2) | everywhere("health/validation_bigram_loss", 3.2))],
    "one-token-dominates": [observed(everywhere("health/commonest_target", 0.7))],
    "ranks-share-data": [observed(RANKS | {"health/shared_samples": dict.fromkeys(STEPS, 1.0)})],
    "question-lost": [observed(question=(False, False))],
    "questions-learned": [observed(question=(True, True))],
    "gradients-vanish": [observed(everywhere("health/zero_gradients", 0.9) | layers("gradient_norm", 0.1))],
    "guard-too-strict": [observed(everywhere("spike/skipped", 4.0))],
    "validation-has-other-tokens": [observed(everywhere("health/validation_unseen", 0.03))],
    "token-never-learned": [observed(everywhere("health/ignored_targets", 0.05) | everywhere("health/unlearned_inputs", 0.05))],
    "pairs-do-not-carry-over": [
        observed({"train/accuracy": dict.fromkeys(STEPS, 0.95), "val/accuracy": {100: 0.5, 200: 0.5, 300: 0.5, 400: 0.5}})
    ],
    "unknown-tokens": [observed(everywhere("health/unknown_tokens", 0.1))],
    "positions-alike": [observed(everywhere("health/equal_columns", 0.3))],
    "warmup-too-long": [observed({"lr": {step: 1e-5 * step for step in (1, *STEPS)}})],
    "schedule-ends-early": [
        observed({"lr": {step: max(0.001, 0.01 * (1 - step / 100)) for step in (10, 20, *STEPS)}}),
        observed({"lr": {step: max(0.0, 0.01 * (1 - step / 200)) for step in (10, 20, *STEPS)}}),
    ],
    "weight-decay-too-high": [observed({"setup/weight_decay": {1: 3.0}})],
    "no-context": [observed(everywhere("health/context_use", 0.0))],
    "pairs-swapped": [
        observed({"train/accuracy": {s: 0.5 + s / 1000 for s in STEPS}, "val/accuracy": {200: 0.3, 400: 0.1}}),
    ],
    "validation-is-random": [observed(everywhere("health/validation_noise", 0.3))],
    "validation-sequences-shorter": [observed(everywhere("health/validation_length", 0.1))],
    "validation-targets-unrelated": [observed(everywhere("health/validation_shifted_targets", 0.05))],
    "validation-other-text": [observed(everywhere("health/validation_bigram_loss", 5.0))],
    "loss-jumps-at-resume": [
        observed(loss(lambda step: 1.5 if step <= 200 else 2.1 - step / 2000), first_steps=[0, 200]),
    ],
    "loaded-weights-unfit": [
        observed({"train/loss": healthy()["train/loss"] | {1: 6.0}}, {"init_from": "runs/base"}),
        observed({"setup/fresh_matrices": {1: 1.0}}, {"init_from": "runs/base"}),
    ],
    "noise-in-training": [
        observed({"health/bigram_loss": {step: 7.0 if step in (250, 300) else 2.4 for step in range(50, 410, 25)}}),
        observed(everywhere("health/bigram_loss", 3.6) | everywhere("health/unigram_loss", 4.2)),
    ],
    "unusual-setting": [
        observed(config={"model": {"dropout": 0.9}}),
        observed(config={"objective": {"init_args": {"loss": "dpo", "beta": 20.0}}}),
    ],
    "answers-without-end": [
        observed(
            everywhere("health/ignored_targets", 0.6) | {"health/answer_ends": dict.fromkeys(STEPS, 0.1)},
            CHATS,
        )
    ],
    "validation-differs": [observed({"val/loss": dict.fromkeys((100, 200), 9.0) | {300: 5.1, 400: 5.0}})],
    "batch-small": [observed({"progress/tokens": {step: 128.0 * step for step in healthy()["progress/tokens"]}})],
}


def test_a_healthy_run_has_no_finding():
    assert diagnose(observed()) == []


def test_a_base_that_was_barely_trained_fits():
    """Its first loss is just below ln 256 = 5.545, and no worse."""
    assert diagnose(observed({"train/loss": healthy()["train/loss"] | {1: 5.2}}, {"init_from": "runs/base"})) == []


def test_what_tensorboard_has_in_place_of_layers_is_judged_as_no_layer():
    """One layer of many that grows is no fault, and the highest of three would be a quarter of them."""
    rows = (1, *range(5, 410, 5))
    curves = {tag: values for tag, values in healthy().items() if tag.split("/")[-1] not in (*LAYERS, "blocks.0")}
    for group, values in {"update_ratio": (0.01, 0.01, 0.5), "weight_norm": (10.0, 10.0, 90.0)}.items():
        for name, value in zip(("lowest", "median", "highest"), values, strict=True):
            curves[f"health/{group}/{name}"] = {step: value if step > 1 else values[0] for step in rows}
    findings, unjudged = examine(Observed({tag: series(values) for tag, values in curves.items()}, CONFIG))
    assert findings == [] and "learning-rate-too-high" in unjudged["health/update_ratio/LAYER"]


def test_preferences_that_are_learned_have_no_finding():
    curves = {
        "train/margin": {1: 0.0} | {step: step / 400 for step in STEPS},
        "train/accuracy": {step: 0.5 + step / 1000 for step in STEPS},
        "train/logp_chosen": {step: -100 - step / 50 for step in STEPS},
        "train/logp_rejected": {step: -100 - step / 5 for step in STEPS},
    } | TUNED
    assert diagnose(observed(curves)) == []


def test_with_something_that_balances_a_dead_expert_is_no_finding():
    curves = everywhere("experts/dead", 1.0) | everywhere("experts/load", 2.0)
    for more in (
        {"model": {"moe": MOE["model"]["moe"] | {"balance": 0.01}}},
        MOE | {"expert_balance": {"init_args": {"rate": 0.001}}},
    ):
        assert diagnose(observed(curves, more)) == []


@pytest.mark.parametrize(
    "curves",
    [
        {"experts/load": {step: 3.5 if step < 350 else 1.9 for step in STEPS}},  # balanced at last
        {"experts/load": dict.fromkeys(STEPS, 1.9), "experts/dead": {step: float(step % 50 == 0) for step in STEPS}},
        {"experts/dead": dict.fromkeys(STEPS, 2.0), "progress/tokens": {step: 300.0 * step for step in STEPS}},  # few tokens
    ],
)
def test_experts_that_become_balanced_and_those_of_small_batches_are_no_finding(curves):
    assert diagnose(observed(curves, MOE)) == []


@pytest.mark.parametrize(
    ("tags", "config"),
    [
        ({"experts/load": 1.05}, {"model": {"moe": {"experts": 5, "top_k": 4}}}),  # the largest is 1.25
        ({"experts/load": 1.0}, {"model": {"moe": {"experts": 4, "top_k": 4}}}),
        (
            {"experts/dead": 2.0, "experts/load": 3.9, "setup/frozen": 9.0},
            MOE | {"lora": {"rank": 4}},
        ),  # its routers are frozen
        ({"experts/bias": 3.0}, MOE),  # of imported weights: nothing moves it
        ({"experts/load": 2.1}, MOE | {"init_from": "imported"}),
    ],
)
def test_what_a_run_cannot_change_is_no_finding(tags, config):
    curves = {tag: dict.fromkeys(STEPS, value) for tag, value in tags.items()}
    assert diagnose(observed(curves | loss(lambda step: 2.5 - step / 1000), config)) == []


def test_a_run_with_few_rows_or_none_has_no_finding():
    for last in (0, 1, 10, 20, 50):
        curves = {tag: {step: v for step, v in values.items() if step <= last} for tag, values in healthy().items()}
        assert diagnose(Observed({tag: series(v) for tag, v in curves.items() if v}, CONFIG)) == []
    assert diagnose(Observed({})) == []


@pytest.mark.parametrize("name", CASES)
def test_its_symptom_makes_it_the_first_finding(name):
    for run in CASES[name]:
        assert [finding.name for finding in diagnose(run)][:1] == [name]


def test_every_rule_has_a_case_and_a_name_of_its_own():
    assert sorted(CASES) == sorted({rule.name for rule in RULES}) and len(CASES) == len(RULES)


def test_no_finding_explains_itself():
    explained = {rule.name: set(rule.explains) for rule in RULES}
    for name, names in explained.items():
        assert names <= set(explained), f"{name} explains a rule that does not exist"
    for _ in RULES:  # every path becomes empty when names without successors are removed
        explained = {name: names & explained.keys() for name, names in explained.items() if names & explained.keys()}
    assert explained == {}


def test_what_follows_from_a_cause_comes_after_it():
    curves = (
        everywhere("health/copied_targets", 1.0)
        | everywhere("health/shifted_targets", 0.07)
        | {"val/loss": {200: 0.02, 400: 0.01}}
    )
    first, *others = diagnose(observed(curves))
    assert first.name == "targets-not-shifted" and {each.name for each in others} == {"loss-too-low", "validation-differs"}
    assert all("targets-not-shifted" in each.follows_from for each in others)


def test_rules_that_need_random_initial_weights_leave_other_runs_alone():
    curves = everywhere("setup/frozen", 64.0) | layers("update_ratio", 1e-4) | loss(lambda step: 2.5 - step / 1000)
    assert diagnose(observed(curves, {"init_from": "runs/base"})) == []
    assert diagnose(observed(curves | layers("update_ratio", 1e-3), {"lora": {"rank": 8}})) == []


def test_the_page_lists_every_rule():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [rule.name for rule in RULES]


# -- ordinary runs that look unusual ------------------------------------------------------------------------------------


def noisy(share: float, seed: int, first: float = 1.5, falls: float = 0.2) -> dict[str, dict[int, float]]:
    """A fine-tuning: the loss falls a little, its rows scatter much."""
    draw = random.Random(seed)
    steps = range(10, 1010, 10)
    loss = {step: (first - falls * step / 1000) * math.exp(draw.gauss(0, share)) for step in steps}
    return {"train/loss": loss, "val/loss": {500: 1.4, 1000: 1.3}, "spike/skipped": {}}


@pytest.mark.parametrize(
    ("passes", "losses"),
    [(0.4, (2.5, 2.9, 2.9)), (2, (2.7, 2.5, 2.9)), (2, (2.5, 2.9, 2.52))],
)
def test_a_single_high_validation_and_a_first_pass_are_no_over_fitting(passes, losses):
    curve = dict(zip((200, 300, 400), losses, strict=True))
    assert diagnose(observed({"val/loss": {100: 3.0, **curve}, "setup/train_tokens": {0: 4e5 / passes}})) == []


def test_a_loss_that_falls_to_zero_has_no_spikes():
    """Rows scatter by a tenth of the loss, which falls to 0.0002. The scatter of the whole curve is that of its end."""
    draw = random.Random(0)
    curve = {step: 5.5 * math.exp(-step / 40) * (1 + 0.1 * draw.gauss(0, 1)) for step in range(1, 401)}
    assert "loss-spikes" not in [each.name for each in diagnose(observed({"train/loss": curve}))]


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2])
def test_rows_that_scatter_are_neither_divergence_nor_spikes(share):
    runs = [observed(noisy(share, seed), {"init_from": "runs/base"}) for seed in range(30)]
    assert [finding.name for run in runs for finding in diagnose(run)] == []


def test_steps_without_targets_have_no_gradients_to_vanish():
    """Of 40 conversations of 260 to 700 tokens in blocks of 256: four steps in nine have a target."""
    ignored, zero = ({step: float(step > 150) for step in healthy()["health/logit_max"]} for _ in range(2))
    curves = {"health/ignored_targets": ignored, "health/zero_gradients": zero} | layers("gradient_norm", 0.1)
    assert {each.name for each in diagnose(observed(curves, CHATS))} == {"targets-ignored"}
    found = diagnose(observed(curves | {"health/ignored_targets": dict.fromkeys(ignored, 0.9)}, CHATS))
    assert {each.name for each in found} == {"gradients-vanish"}


def test_skipped_steps_are_spikes_in_a_run_of_few_rows_too():
    """The spike guard ends a run after ten skipped steps in a row."""
    curves = {tag: {step: v for step, v in values.items() if step <= 45} for tag, values in healthy().items()}
    assert diagnose(observed(curves)) == []
    found = diagnose(observed(curves | {"spike/skipped": {20: 0.0, 25: 5.0, 30: 5.0}}))
    assert [finding.name for finding in found] == ["loss-spikes"]
    assert found[0].seen.startswith("10 of ")


@pytest.mark.parametrize(
    ("share", "tokens", "found"),
    [(0.95, 200_000, False), (0.998, 40_000, False), (0.998, 60_000, True), (0.95, 300_000, True), (0.85, 300_000, False)],
)
def test_a_vocabulary_is_unused_when_enough_text_was_seen(share, tokens, found):
    facts = {"health/untouched_embeddings": {400: share}, "progress/tokens": {400: tokens}, "setup/vocab_size": {0: 50_000.0}}
    assert ("vocabulary-unused" in [each.name for each in diagnose(observed(facts))]) == found


def test_repeated_text_is_a_finding_only_in_the_first_pass():
    repeated = everywhere("health/repeated_samples", 1.0) | everywhere("health/repeated_spans", 1.0)
    passes = everywhere("setup/train_tokens", 1e5)  # four in 400 steps
    later = {tag: {step: v if step > 100 else 0.0 for step, v in values.items()} for tag, values in repeated.items()}
    assert diagnose(observed(passes | later)) == []
    unknown = {tag: values for tag, values in (healthy() | repeated).items() if not tag.startswith("setup/")}
    assert diagnose(Observed({tag: series(values) for tag, values in unknown.items()}, CONFIG)) == []


@pytest.mark.parametrize(("tokens", "share"), [(0.11e6, 0.137), (1e6, 0.2)])
def test_lines_that_code_repeats_are_no_validation_text_in_training(tokens, share):
    """Measured on the shipped recipe bytes (0.11 passes), and on the whole library in a pass."""
    steps = healthy()["progress/tokens"]
    run = observed({**everywhere("health/validation_overlap", share), "progress/tokens": {s: s * tokens / 400 for s in steps}})
    assert diagnose(run) == []


def test_the_validation_text_in_training_is_counted_from_the_last_start():
    overlap = everywhere("health/validation_overlap", 0.5) | everywhere("setup/train_tokens", 1e6)
    scalars = healthy() | overlap | {"progress/tokens": {step: 5e3 * step for step in healthy()["progress/tokens"]}}
    found = diagnose(Observed({tag: series(values) for tag, values in scalars.items()}, CONFIG, first_steps=(0, 300)))
    assert [(each.name, each.seen) for each in found] == [
        ("validation-in-training", "50.0% of the validation text occurred in training, in 0.50 passes over the training text")
    ]


def test_a_fine_tuning_may_ignore_most_targets():
    curves = everywhere("health/ignored_targets", 0.8) | loss(lambda step: 2.5 - step / 1000)
    assert diagnose(observed(curves, {"init_from": "runs/base"})) == []


def test_an_infinite_gradient_now_and_then_is_how_fp16_finds_its_scale():
    norms = {step: math.inf if step in (300, 700) else 1.0 for step in range(10, 2010, 10)}
    assert diagnose(observed({"grad/norm": norms}, with_precision("16-mixed"))) == []


def test_the_loss_of_further_tokens_is_no_wrong_scale():
    """With weight 0.3 and a loss a tenth larger, the loss of the backward pass is 1.33 times the logged one."""
    curves = everywhere("health/backward_loss_ratio", 1.33) | {
        "train/loss_ahead": {step: 1.1 * value for step, value in healthy()["train/loss"].items()}
    }
    assert "loss-scale" not in [finding.name for finding in diagnose(observed(curves, {"loss": {"ahead_weight": 0.3}}))]
    assert "loss-scale" in [finding.name for finding in diagnose(observed(curves))]


def test_the_loss_of_a_teacher_is_no_wrong_scale():
    """The logged loss is the cross-entropy alone; the other half of the loss is a smaller divergence."""
    curves = everywhere("health/backward_loss_ratio", 0.58)
    assert "loss-scale" not in [
        finding.name for finding in diagnose(observed(curves, {"objective": {"init_args": {"weight": 0.5}}}))
    ]
    assert "loss-scale" in [finding.name for finding in diagnose(observed(curves))]


@pytest.mark.parametrize(
    ("curves", "config"),
    [
        # Each chat is there four times: in a pass of 0.25, 1 - 0.75^3 of the sequences have been read before.
        ({"health/repeated_samples": {step: 1 - (1 - step / 1000) ** 3 for step in range(1, 410, 10)}}, {"init_from": "base"}),
        # Label smoothing is no part of the logged loss.
        ({"health/backward_loss_ratio": {step: 1 + step / 200 for step in (1, *range(50, 410, 50))}}, {}),
        # A few batches with longer answers, while validation on one text falls.
        ({"train/loss": {s: 5.5 - s / 80 + (1.5 if s > 330 else 0) for s in STEPS}}, {}),
        # Attention that collapses, as at too high a rate, is there.
        ({"health/context_use": {2: 0.3, 200: 0.0, 300: 0.0, 400: 0.0}}, {}),
        # torch's AdamW with its default of 0.01.
        (everywhere("setup/decayed_vectors", 9.0), {}),
    ],
)
def test_what_healthy_runs_do_is_no_finding(curves, config):
    changed = loss(lambda step: 2.5 - step / 1000) if config else {}
    assert diagnose(observed(curves | changed, config)) == []


def test_a_high_rate_explains_what_follows_from_it():
    curves = layers("update_ratio", 0.5) | loss(lambda step: 5.5 + step / 100 if step < 200 else 5.0)
    curves |= {"val/loss": {100: 7.0, 200: 7.5, 300: 7.2, 400: 7.7}} | everywhere("health/dead_units/blocks.0", 0.9)
    first, *others = diagnose(observed(curves))
    assert first.name == "learning-rate-too-high" and all(first.name in other.follows_from for other in others)


def test_rules_without_rows_are_named_and_not_called_silent():
    bare = {tag: series(values) for tag, values in healthy().items() if not tag.startswith("health/")}
    findings, unjudged = examine(Observed(bare, CONFIG))
    assert findings == [] and "learning-rate-too-high" in unjudged["health/update_ratio/LAYER"]
    assert {"future-leak"} == {*unjudged["health/future_leak"]}
    assert examine(observed())[1] == {}


def test_the_time_of_all_rules_grows_as_the_rows_do():
    """Of curves in which every step is a row; four times as many rows take at most eight times as long."""
    draw, times = random.Random(0), []
    for rows in (5_000, 5_000, 20_000):  # the first one warms up
        steps = range(1, rows + 1)
        every = {
            "lr": {s: 1e-3 * min(1.0, 20 * s / rows) for s in steps},
            "train/loss": {s: 2 + draw.random() / 9 for s in steps},
        }
        tags = ("grad/norm", "grad/norm_clipped", "grad/clip_fraction", "spike/skipped", "progress/tokens", "train/accuracy")
        curves = healthy() | every | {tag: dict.fromkeys(steps, 1.0) for tag in tags}
        run = Observed({tag: series(values) for tag, values in curves.items()}, CONFIG, first_steps=range(0, rows, rows // 100))
        began = time.process_time()
        diagnose(run)
        times.append(time.process_time() - began)
    assert times[2] < 8 * times[1]


def test_a_rate_that_ends_a_run_in_not_a_number_comes_first():
    """As measured: AdamW at 500, a guard that stops at step 15. Every layer grew more than twenty times."""
    early = range(1, 6)
    curves = {f"health/weight_norm/{layer}": {step: 2.0 * 40.0**step for step in early} for layer in LAYERS}
    curves |= {f"health/update_ratio/{layer}": dict.fromkeys(early, 16.7) for layer in LAYERS}
    curves |= {
        "train/loss": {1: 5.4, 10: 6e9, 15: 6e9},
        "lr": {1: 33.3, 10: 333.0, 15: 500.0},
        "grad/norm": {1: 2.3, 10: math.inf, 15: math.inf},
        "grad/clip_fraction": {1: 1.0, 10: 1.0, 15: 1.0},
        "spike/skipped": {1: 0.0, 10: 5.0, 15: 5.0},
        "health/logit_max": {1: 0.5, 5: 7e9},
        "setup/vocab_size": {0: 256.0},
        "health/dead_units/blocks.0": {1: 0.0, 5: 1.0},
    }
    config = CONFIG | {"trainer": {"max_steps": 200, "precision": "auto"}}
    first, *others = diagnose(Observed({tag: series(values) for tag, values in curves.items()}, config))
    assert first.name == "learning-rate-too-high" and "learning rate" in first.rule.change
    assert {each.name for each in others} >= {"loss-not-finite", "large-logits", "dead-units"}
    assert all(first.name in each.follows_from for each in others)
    bare = {tag: series(values) for tag, values in curves.items() if not tag.startswith("health/")}
    first, *others = diagnose(Observed(bare, config))
    assert first.name == "loss-not-finite" and first.rule.cause.startswith("the learning rate is too high")
    assert all(first.name in each.follows_from for each in others)


@pytest.mark.parametrize(
    ("curves", "config", "names"),
    [
        (everywhere("grad/norm", 37.0), {}, []),  # 37 times the limit, and the loss falls
        (loss(lambda step: 2.5), {"init_from": "base"}, []),  # a fine-tuning need not fall
        (everywhere("grad/norm", 0.5) | everywhere("grad/clip_fraction", 0.3) | FLAT, {}, []),
        (everywhere("grad/norm", 37.0) | layers("update_ratio", 0.3), {}, ["learning-rate-too-high", "clipped-at-every-step"]),
    ],
)
def test_a_norm_at_its_limit_names_the_rate_if_the_loss_or_the_updates_do(curves, config, names):
    findings = [each for each in diagnose(observed(curves, config)) if each.name in ("clipped-at-every-step", *names)]
    assert [finding.name for finding in findings] == names
    assert all("learning rate" in finding.rule.change and "clip" not in finding.rule.change for finding in findings)


@pytest.mark.parametrize(
    "norm",
    [
        lambda step: 0.5 + step / 200,  # measured: a healthy run of width 8 rose from 0.56 to 2.6
        lambda step: 8.0 if step > 390 else 1.0,  # a spike at the end
        lambda step: 0.4 if 150 < step < 250 else 1.3,  # lower for a while
    ],
)
def test_a_norm_that_does_not_rise_faster_and_faster_is_no_finding(norm):
    assert diagnose(observed({"grad/norm": {step: norm(step) for step in STEPS}})) == []


@pytest.mark.parametrize(("gain", "high"), [(0.115, False), (0.197, True), (0.6, True)])
def test_narrow_models_begin_with_weights_so_small_that_they_may_grow(gain, high):
    """Measured: AdamW at 0.006 is best for width 32, whose layers double their norms, and move by a quarter in a step."""
    curves = {f"health/weight_norm/{layer}": {1: 2.0, 20: 4.2, 100: 4.6} for layer in LAYERS} | layers("update_ratio", 0.25)
    findings = diagnose(observed(curves | {"setup/initial_gain": {0: gain}}))
    assert [finding.name for finding in findings[:1]] == (["learning-rate-too-high"] if high else [])


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": {step: 0.01 if step < 60 else 1e-4 for step in OFTEN}},  # the rate has come down
        {"train/loss": {step: 3.4 - step / 1000 for step in OFTEN}},  # it falls by 4 % in two thirds of the steps
        {"health/bigram_loss": dict.fromkeys((1, *range(50, 410, 50)), 3.0)},  # a text of pairs, learned
        {"health/counted_pairs": dict.fromkeys((1, *range(50, 410, 50)), 100.0)},  # too few to know
    ],
)
def test_a_loss_that_rests_where_nothing_is_left_to_learn_is_no_under_fitting(changed):
    assert "under-fitting" not in [finding.name for finding in diagnose(observed(UNDER_FITTING | changed))]

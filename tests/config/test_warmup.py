"""A warmup as a share of the schedule or in tokens becomes a number of steps before a callback sees it."""

import inspect
from pathlib import Path

import pytest
import yaml
from recipe_runs import RECIPE, TEXT, run

from lit_llm import callbacks
from lit_llm.commands.short_runs import ShortRuns
from lit_llm.config.arguments import read
from lit_llm.config.groups import WARMUPS
from lit_llm.config.recipe_files import SHIPPED, with_base
from lit_llm.config.resolve import resolved
from lit_llm.plan.planned_recipe import build_to_plan, planned_run

WITH_WARMUP = ["Cosine", "Linear", "WSD", "Constant", "InverseSquareRoot"]
RAMP = "[[0, 128], [500, 256], [2000, 512]]"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("tiny.yaml").write_text(RECIPE)  # 4 sequences of 16 tokens a step, 8 steps, 2 of them warmup


def steps_of(*arguments: str) -> int:
    return yaml.safe_load(resolved(list(arguments)))["schedule"]["init_args"]["warmup_steps"]


def steps_by_hand(pairs: list[list[float]], tokens: float) -> int:
    """Batch by batch: that of the last pair whose tokens have been read."""
    steps = read_so_far = 0
    while read_so_far < tokens:
        read_so_far += [size for threshold, size in pairs if threshold <= read_so_far][-1]
        steps += 1
    return steps


@pytest.mark.parametrize("name", WITH_WARMUP)
def test_a_share_or_tokens_work_for_every_schedule_with_a_warmup_by_flag_recipe_and_overlay(name):
    Path("overlay.yaml").write_text(f"schedule: {{class_path: {name}, init_args: {{warmup_fraction: 0.25}}}}")
    Path("based.yaml").write_text(f"base: tiny.yaml\nschedule: {{class_path: {name}, warmup_tokens: 2e2}}")  # 3.1 batches
    eighty = ["--trainer.max_steps", "80"]
    assert steps_of("--config", "tiny.yaml", "--config", "overlay.yaml", *eighty) == 20
    assert steps_of("--config", "based.yaml", *eighty) == 4
    assert steps_of("--config", "based.yaml", *eighty, "--schedule.warmup_fraction", "0.1") == 8  # a later source counts
    assert steps_of("--config", "based.yaml", *eighty, "--schedule.warmup_steps", "3") == 3
    assert steps_of("--config", "tiny.yaml", *eighty, f"--schedule={{class_path: {name}, warmup_fraction: 0.5}}") == 40


def test_a_share_is_of_the_schedule_and_tokens_need_no_length():
    assert steps_of("--config", "tiny.yaml", "--schedule.warmup_fraction", "1.0") == 8
    assert steps_of("--config", "tiny.yaml", "--schedule.warmup_fraction", "0.1", "--schedule.total_steps", "50") == 5
    assert steps_of("--config", "tiny.yaml", "--schedule.warmup_tokens", "65", "--trainer.max_epochs", "2") == 2


@pytest.mark.parametrize("tokens", [1, 128, 129, 512, 513, 2000, 2304, 5000])
@pytest.mark.parametrize("where", ["--batch_ramp BatchRamp --batch_ramp", "--trainer.callbacks+ BatchRamp --trainer.callbacks"])
def test_tokens_are_summed_through_the_ramp(tokens, where):
    flags = [*where.split()[:-1], f"{where.split()[-1]}.tokens_per_batch={RAMP}", "--trainer.max_steps", "99"]
    found = steps_of("--config", "tiny.yaml", "--schedule.warmup_tokens", str(tokens), *flags)
    assert found == steps_by_hand(yaml.safe_load(RAMP), tokens)


@pytest.mark.parametrize("name", ["gpt3-125m", "gpt3-350m", "gpt3-1.3b", "gpt3-175b"])
def test_gpt3_warms_up_over_375_million_tokens_of_its_ramp(name):
    (pairs,) = (
        content["batch_ramp"]["init_args"]["tokens_per_batch"] for _, content in with_base(SHIPPED / f"{name}.yaml")[1:]
    )
    assert steps_of("--config", name) == steps_by_hand(pairs, 375e6)


REFUSED = {
    "twice as flags": (["--schedule.warmup_fraction", "0.1", "--schedule.warmup_tokens", "5"], "keep one"),
    "beside steps": (["--schedule.warmup_fraction", "0.1", "--schedule.warmup_steps", "5"], "keep one"),
    "twice in a file": (["--config", "twice.yaml"], "keep one"),
    "above 1": (["--schedule.warmup_fraction", "1.5"], "1.5"),
    "below 0": (["--schedule.warmup_tokens=-1"], "-1"),
    "no number": (["--schedule.warmup_fraction", ".nan"], ".nan"),
    "text": (["--schedule.warmup_fraction", "much"], "'much'"),
    "null": (["--schedule.warmup_fraction", "null"], "null"),
    "beyond the schedule": (["--schedule.warmup_tokens", "375e6"], "5,859,375 steps, but the schedule has 8"),
    "no length": (["--schedule.warmup_fraction", "0.1", "--trainer.max_epochs", "2"], "--schedule.warmup_fraction"),
    "no warmup": (["--schedule", "Decay", "--schedule.warmup_fraction", "0.1"], "Decay has no warmup"),
    "no schedule": (["--schedule", "null", "--schedule.warmup_fraction", "0.1"], "schedule.warmup_fraction is given too"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_warmup_that_means_nothing_is_refused_by_its_key(case, capsys):
    Path("twice.yaml").write_text("schedule: {init_args: {warmup_fraction: 0.1, warmup_steps: 3}}")
    flags, said = REFUSED[case]
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *flags)
    assert code == 2 and err.count("error: ") == 1 and said in err and "warmup_" in err
    assert not Path("runs").exists()


@pytest.mark.parametrize("flags", [["--schedule.warmup_fraction", "0.05"], ["--schedule.warmup_tokens", "0"]])
def test_a_note_says_that_it_is_no_step(flags, capsys):
    code, out, err = run(capsys, "fit", "--config", "tiny.yaml", *flags, "--print_config")
    assert code == 0 and "note: " in err and " 0 steps" in err and "warmup_steps: 0" in out


def test_another_class_keeps_it_like_steps_and_one_without_a_warmup_drops_it(capsys):
    Path("share.yaml").write_text("base: tiny.yaml\nschedule: {class_path: Linear, warmup_fraction: 0.5}")
    assert steps_of("--config", "share.yaml", "--schedule", "WSD") == 4
    code, out, err = run(capsys, "fit", "--config", "share.yaml", "--config", "decay", "--print_config")
    assert code == 0 and "schedule.warmup_fraction=0.5" in err and "warmup" not in out


def test_callbacks_know_steps_only():
    for name in WITH_WARMUP:
        assert not WARMUPS.keys() & inspect.signature(getattr(callbacks, name)).parameters.keys()


class Rates(callbacks.StepSeed):
    """The rate of every step."""

    def __init__(self):
        super().__init__(0)
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


def test_plan_and_find_lr_see_the_number_also_where_they_drop_the_ramp():
    words = ["--config", "tiny.yaml", "--schedule.warmup_tokens", "1000", "--batch_ramp", "BatchRamp", "--optimizer", "AdamW"]
    words += ["--optimizer.lr", "0.1", "--batch_ramp.tokens_per_batch=[[0, 32], [320, 64]]", "--trainer.max_steps", "40"]
    number = steps_by_hand([[0, 32], [320, 64]], 1000)  # 10 + 11; without the ramp 16
    rate = planned_run(build_to_plan(words))[0].schedule.rate
    assert number == 21 and [rate(t) for t in (1, 10, 21)] == pytest.approx([1 / 21, 10 / 21, 1.0]) and rate(22) < 1
    rates = Rates()
    ShortRuns(read(words)).observe(3, [rates], seed=0)
    assert rates.seen == pytest.approx([0.1 / 21, 0.2 / 21, 0.3 / 21])

"""Phases against the rates of callbacks/learning_rate_schedules.py step by step, and the sequences of a batch ramp."""

from itertools import groupby
from types import SimpleNamespace

import pytest

from lit_llm.callbacks import WSD, BatchRamp, Constant, Cosine, InverseSquareRoot, Linear
from lit_llm.core.batch_sizes import sequences_before, steps_for
from lit_llm.core.schedule_phases import phases

STEPS = 40


def by_the_rates(schedule, warmup_steps: int) -> list[tuple[str, int]]:
    """The phases implied by the rates: rising, falling, constant at the peak, or constant below it."""
    schedule.resolve(SimpleNamespace(max_steps=STEPS))
    before, found = 0.0 if warmup_steps else 1.0, []
    for step in range(1, STEPS + 1):
        rate = schedule.rate(step, 1.0)
        same = "stable" if rate == 1.0 else "constant"
        found.append("warmup" if rate > before else "decay" if rate < before else same)
        before = rate
    return [(name, len(list(group))) for name, group in groupby(found)]


@pytest.mark.parametrize("total_steps", [None, 40, 39, 25, 41, 70])
@pytest.mark.parametrize("warmup_steps", [0, 5])
@pytest.mark.parametrize("kind", [Cosine, Linear, WSD])
def test_phases_begin_and_end_where_the_rates_do(kind, warmup_steps, total_steps):
    options = {"decay_steps": 12} if kind is WSD else {}
    expected = by_the_rates(kind(warmup_steps, final_ratio=0.1, total_steps=total_steps, **options), warmup_steps)
    schedule = kind(warmup_steps, final_ratio=0.1, total_steps=total_steps, **options)
    schedule.resolve(SimpleNamespace(max_steps=STEPS))
    found = phases(lambda step: schedule.rate(step, 1.0), STEPS, lambda step: step**3)
    assert [(phase.name, phase.steps) for phase in found] == expected
    ends = [sum(phase.steps for phase in found[: i + 1]) for i in range(len(found))]
    assert [sum(phase.tokens for phase in found[: i + 1]) for i in range(len(found))] == [end**3 for end in ends]
    assert ends[-1] == STEPS


@pytest.mark.parametrize("kind", [Constant, InverseSquareRoot])
@pytest.mark.parametrize("warmup_steps", [5, 60])
def test_schedules_without_an_end_last_until_the_run_ends(kind, warmup_steps):
    found = phases(lambda step: kind(warmup_steps).rate(step, 1.0), STEPS, lambda step: step)
    assert [(phase.name, phase.steps) for phase in found] == by_the_rates(kind(warmup_steps), warmup_steps)


def test_phases_of_a_schedule_of_ones_own_are_those_of_its_rates():
    def rate(step):  # a warmup of 30, two levels, and a cooldown over the last 60 of 300
        return min(step / 30, 1.0 if step <= 100 else 0.5, (300 - step) / 120)

    expected = [("warmup", 30), ("stable", 70), ("decay", 1), ("constant", 139), ("decay", 60)]
    assert [(p.name, p.steps) for p in phases(rate, 300, lambda step: step)] == expected
    long = phases(lambda step: rate(step / 10_000), 3_000_000, lambda step: step)
    assert [(p.name, p.steps) for p in long][-1] == ("decay", 600_000)
    assert [p.name for p in phases(lambda step: 0.5 + step % 2 / 2, 300, lambda step: step)] == ["varies"]
    assert [p.name for p in phases(lambda step: 0.5, 300, lambda step: step)] == ["constant"]


RAMPS = [((0, 8),), ((0, 2), (3, 5), (4, 12)), ((0, 12), (7, 3))]


@pytest.mark.parametrize("stages", RAMPS)
def test_sequences_are_those_of_the_steps_one_by_one(stages):
    sizes = [next(size for first, size in reversed(stages) if first <= step) for step in range(20)]
    assert [sequences_before(stages, step) for step in range(21)] == [sum(sizes[:step]) for step in range(21)]
    for sequences in range(sum(sizes)):
        assert steps_for(stages, sequences) == next(step for step in range(21) if sum(sizes[:step]) >= sequences)


def test_sequences_are_those_of_the_callback():
    ramp = BatchRamp([(0, 64), (1000, 128), (1020, 256), (5000, 512)])
    stages = tuple((stage.step, stage.size // 8) for stage in ramp.stages)
    for step in range(100):
        assert sequences_before(stages, step) * 8 == ramp.tokens_before(step)
    for samples in range(2000):
        assert steps_for(stages, samples) == ramp.steps_for(samples * 8)

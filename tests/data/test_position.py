"""The samples of each step and rank, against handwritten lists. No Lightning, no data."""

from __future__ import annotations

import pytest

from lit_llm.core.errors import UserError
from lit_llm.data.position import StepSamples, batch_problems, saved_base, setting_changes

RAMP = ((0, 2), (3, 8), (5, 12))  # steps of 2, 2, 2, 8, 8, 12, 12, … samples


def numbers(parts):
    return [list(part) for part in parts]


def test_every_sample_of_a_step_is_in_one_micro_batch_of_one_rank():
    two = StepSamples(RAMP, most=3, ranks=2)
    assert [two.size(step) for step in range(7)] == [2, 2, 2, 8, 8, 12, 12]
    assert [two.before(step) for step in range(7)] == [0, 2, 4, 6, 14, 22, 34]
    assert [two.micro_batch(step) for step in (0, 3, 5)] == [1, 2, 3]
    assert numbers(two.of_rank(3, 0)) == [[6, 7], [8, 9]] and numbers(two.of_rank(3, 1)) == [[10, 11], [12, 13]]
    assert numbers(two.of_rank(5, 1)) == [[28, 29, 30], [31, 32, 33]]
    assert [two.micro_batches_before(step) for step in (-1, 0, 3, 4, 7)] == [0, 0, 3, 5, 11]


def test_a_continued_run_goes_on_after_the_samples_of_its_checkpoint_whatever_its_batches_are():
    continued = StepSamples(((0, 8),), base=(4, 14))
    assert (continued.before(4), continued.before(6), numbers(continued.of_rank(4, 0))) == (14, 30, [list(range(14, 22))])


def test_problems_name_each_size_once():
    assert batch_problems(6, None, 2, None) == batch_problems(6, None, 2, None, ramp=[7]) == []  # the length is not known
    assert len(batch_problems(6, None, 2, None, ramp=[20, 20, 48], length=8)) == 1
    [problem] = batch_problems(6, None, 1, None, ramp=[16, 64], length=8)
    assert "(--data.global_batch_size 8)" in problem


@pytest.mark.parametrize(
    "state", [{}, {"consumed_samples": -1, "global_step": 1}, {"consumed_samples": 3, "global_step": True}]
)
def test_a_position_that_is_no_count_is_refused(state):
    with pytest.raises(UserError, match="--resume"):
        saved_base(state)


def test_settings_that_both_states_have_are_compared():
    changes = setting_changes(
        {"seed": 1, "fingerprint": "a", "packing": "x"}, {"seed": 2, "fingerprint": "b", "more": 1}, str.upper
    )
    assert changes == ["data.seed was 2 in the checkpoint and is 1", "FINGERPRINT"]

"""The arithmetic of `find-lr`, against numpy and known minima."""

import math

import numpy as np
import pytest

from lit_llm.training.rate_search import (
    Sweep,
    has_diverged,
    search,
    smooth,
    swept_rates,
    vertex,
    without_batches,
)


def test_the_smoothed_loss_is_a_weighted_mean_of_the_past():
    losses = [5.0, 4.0, 4.5, 3.0]
    weights = [0.9 ** (2 - i) for i in range(3)]
    assert smooth(losses, 0.9)[2] == pytest.approx(np.average(losses[:3], weights=weights), rel=1e-12)
    assert smooth([2.0] * 50) == pytest.approx([2.0] * 50)  # no bias towards the first or towards zero


def test_a_sweep_ends_where_the_loss_rises_or_breaks():
    falling = list(np.linspace(5, 3, 40))
    assert not has_diverged(falling) and not has_diverged([])
    assert has_diverged([*falling, math.nan])
    rising = next(i for i in range(1, 60) if has_diverged([*falling, *np.linspace(3, 6, 60)[:i]]))
    assert smooth([*falling, *np.linspace(3, 6, 60)[:rising]])[-1] > 3 + 0.5 * (5 - 3)  # half of the gain is lost
    sweep = Sweep(swept_rates(1e-4, 1.0, 5), [3.0, 2.0, 1.0, 9.0, math.nan])
    assert sweep.rates == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert sweep.edge == pytest.approx(1e-2) and sweep.start == pytest.approx(1e-2 / 4)
    assert Sweep([1e-3, 1e-2], [math.nan]).edge == 1e-3


def test_hard_batches_do_not_end_a_sweep_of_trained_weights():
    """Training gains 0.3 between rates 60 and 80, then loses 2. Single batches differ by as much as it gains."""
    hard = 2.3 + 0.3 * np.random.default_rng(0).standard_normal(100)
    effect = np.interp(np.arange(100), [0, 60, 80, 99], [0, 0, -0.3, 1.7])
    swept, at_first = [*(hard + effect)], [*hard]
    assert without_batches(swept[:70], at_first) == pytest.approx(hard.mean() + effect[:70], rel=1e-12)

    def end(losses):
        return next((i for i in range(1, 100) if has_diverged(losses[:i])), 100)

    rates = swept_rates(1e-6, 10, 100)
    assert end(swept) < 20 and 80 < end(without_batches(swept, at_first)) < 90
    assert rates[78] < Sweep(rates, without_batches(swept, at_first)).edge < rates[84]


@pytest.mark.parametrize("minimum", [-7, -1, 0, 3, 8, 20])
def test_the_search_finds_the_minimum_with_few_runs(minimum):
    measured = []

    def loss_at(exponent):
        measured.append(exponent)
        return math.nan if exponent > minimum + 2 else 2 + 0.01 * (exponent - minimum - 0.3) ** 2

    losses = search(loss_at)
    assert len(measured) == len(set(measured)) <= 5 + abs(minimum) / 2 + 2
    assert min(losses, key=losses.__getitem__) == minimum and {minimum - 1, minimum + 1} <= set(losses)
    assert vertex(losses) == pytest.approx(minimum + 0.3)  # a parabola is found exactly


def test_the_search_ends_where_nothing_trains_and_a_broken_neighbour_needs_no_parabola():
    assert min(search(lambda exponent: math.nan)) == -24
    assert vertex({-1: 2.1, 0: 2.0, 1: math.inf}) == 0 and vertex({0: 2.0}) == 0 and vertex({-1: 2.0, 0: 2.0, 1: 2.0}) == -1

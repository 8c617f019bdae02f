"""The order of a mixture: exact counts, no repeats within an epoch, and a source's own order that depends on nothing else."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest

from lit_llm.core.errors import UserError
from lit_llm.data.mixture_order import MixtureOrder, Phase, continued, phases_of, smallest_quotas
from lit_llm.data.order import permute

CONFIGURATIONS = {
    "two sources": ([Phase(9_000, {"web": 4, "code": 1}), Phase(10_000, {"web": 2, "code": 3})], {"web": 3_000, "code": 577}),
    "one source": ([Phase(10_000, {"web": 1})], {"web": 1_234}),
    "a period of 1000": (
        [Phase(10_001, {"web": 801, "code": 150, "books": 49})],
        {"code": 97, "books": 1, "web": 5_000},
    ),
    "phases that end inside periods": (
        [Phase(17, {"a": 3, "b": 7}), Phase(4_999, {"b": 1, "c": 1}), Phase(5_003, {"a": 1}), Phase(10_000, {"a": 6, "c": 5})],
        {"a": 300, "b": 2_000, "c": 41},
    ),
    "ten sources": (
        [Phase(3_333, {f"s{i}": i + 1 for i in range(10)}), Phase(10_000, {f"s{i}": 10 - i for i in range(10)})],
        {f"s{i}": 20 + i for i in range(10)},
    ),
}


def source_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} source {name}".encode(), digest_size=8).digest(), "little")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_counts_follow_the_quotas_and_samples_of_a_source_are_numbered_without_gaps(name):
    phases, sizes = CONFIGURATIONS[name]
    order = MixtureOrder(phases, sizes=sizes, seed=7)
    names = list(sizes)
    total = phases[-1].end
    addresses = order.locate(np.arange(total))
    one_hot = np.eye(len(names), dtype=np.int64)[addresses[:, 0]]
    counts = np.concatenate([np.zeros((1, len(names)), np.int64), np.cumsum(one_hot, axis=0)])  # before each sample

    # The k-th sample of a source is the k-th of its permutations, one after the other: no number is skipped or repeated.
    for number, source in enumerate(names):
        blocks = addresses[addresses[:, 0] == number, 1]
        k = np.arange(len(blocks))
        expected = permute(k % sizes[source], size=sizes[source], seed=source_seed(7, source), epoch=k // sizes[source])
        np.testing.assert_array_equal(blocks, expected)
        for epoch in range(len(blocks) // sizes[source]):
            assert len(set(blocks[epoch * sizes[source] : (epoch + 1) * sizes[source]].tolist())) == sizes[source]

    # 1,000 steps at random places have the same samples as in one go.
    random = np.random.default_rng(0)
    steps = [np.arange(start, start + 64) for start in random.integers(0, total - 64, 1_000)]
    np.testing.assert_array_equal(order.locate(np.concatenate(steps)), addresses[np.concatenate(steps)])
    for step in steps[:20]:
        np.testing.assert_array_equal(order.locate(step), addresses[step])
    for start in (*random.integers(0, total, 20).tolist(), total):
        assert Counter(order.drawn(start)) == Counter(dict(zip(names, counts[start].tolist(), strict=True)))

    # After any n samples of a phase, at most q (P - q) / P off the share; after every P samples, exact.
    for begin, phase in zip([0, *(p.end for p in phases)], phases, strict=False):
        period = sum(phase.quotas.values())
        n = np.arange(phase.end - begin + 1)
        for number, source in enumerate(names):
            q = phase.quotas.get(source, 0)
            off = (counts[begin : phase.end + 1, number] - counts[begin, number]) * period - n * q
            assert np.all(np.abs(off) <= q * (period - q))
            assert np.all(off[::period] == 0)


def test_the_order_never_changes_between_versions_and_machines():
    # A change here changes what every saved run of a mixture reads next. Do not update these numbers.
    phases = [Phase(5, {"web": 2, "code": 1}), Phase(12, {"web": 1, "code": 1})]
    order = MixtureOrder(phases, sizes={"web": 1_000, "code": 4}, seed=0)
    web, code = order.locate(np.arange(12))[::2].tolist(), order.locate(np.arange(12))[1::2].tolist()
    assert web == [[0, 664], [0, 230], [0, 740], [0, 105], [0, 623], [0, 64]]
    assert code == [[1, 0], [1, 3], [1, 2], [1, 1], [1, 3], [1, 0]]


# Critical values for a chance of 1e-6, as in test_order.py.


def test_other_sources_change_nothing_in_the_order_of_a_source():
    def blocks_of_code(quotas: dict[str, int], sizes: dict[str, int]) -> list[int]:
        found = MixtureOrder([Phase(900, quotas)], sizes=sizes, seed=5).locate(np.arange(900))
        return found[found[:, 0] == list(sizes).index("code"), 1][:100].tolist()

    alone = blocks_of_code({"code": 1}, {"code": 300})
    assert blocks_of_code({"code": 1, "web": 4}, {"code": 300, "web": 10}) == alone
    assert blocks_of_code({"books": 2, "web": 3, "code": 2}, {"web": 70, "code": 300, "books": 9}) == alone
    assert (
        blocks_of_code({"code": 1}, {"code": 300})[:5]
        != MixtureOrder([Phase(900, {"text": 1})], sizes={"text": 300}, seed=5).locate(np.arange(5))[:, 1].tolist()
    )


def test_samples_in_any_order_and_far_away():
    phases = [Phase(2**40, {"a": 9_999, "b": 1}), Phase(2**41, {"b": 1})]
    order = MixtureOrder(phases, sizes={"a": 2**30, "b": 3}, seed=2)
    g = np.random.default_rng(0).integers(0, 2**42, 300)  # as many periods of 10,000 places: computed in pieces
    together = order.locate(g)
    alone = np.concatenate([order.locate(g[i : i + 1]) for i in range(0, 300, 10)])
    np.testing.assert_array_equal(together[::10], alone)
    assert set(together[g >= 2**40, 0].tolist()) == {1}  # also after the last phase
    assert order.drawn(2**40)["b"] in range(2**40 // 10_000, 2**40 // 10_000 + 2)


# ---- Weights and phases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        ({"a": 80, "b": 20}, {"a": 4, "b": 1}),
        ({"a": 0.1, "b": 0.2, "c": 0.7}, {"a": 1, "b": 2, "c": 7}),  # in floats, the sum is not 1
        ({"a": 100, "b": 0}, {"a": 1}),
        ({"a": 99.99, "b": 0.01}, {"a": 9_999, "b": 1}),
    ],
)
def test_weights_become_the_smallest_whole_numbers(weights, quotas):
    assert smallest_quotas(weights) == quotas


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 80, "b": 30}, "The weights sum to 110, but must sum to 100 or to 1"),
        ({}, "The weights sum to 0,"),
        ({"a": 100, "b": -10}, "The weight of b is -10, but must be from 0 to 100"),
        ({"a": float("nan")}, "The weight of a is nan"),
        ({"a": 99.999, "b": 0.001}, "exact only over 100,000 samples, .* 10,000 are .* percent, as a: 99.99, b: 0.01$"),
        ({"a": 0.333333, "b": 0.333333, "c": 0.333334}, "over 1,000,000 samples, .*, as a: 0.3334, b: 0.3333, c: 0.3333$"),
    ],
)
def test_weights_that_are_refused(weights, message):
    with pytest.raises(UserError, match=message):
        smallest_quotas(weights)


A, B, C = {"a": 1}, {"b": 1}, {"a": 1, "b": 1}


def test_phases_end_at_whole_samples():
    assert phases_of([0.9, 1.0], [A, B], 1_000) == [Phase(900, A), Phase(1_000, B)]
    assert phases_of([0.7, 1.0], [A, B], 10) == [Phase(7, A), Phase(10, B)]  # 0.7 * 10 < 7 in floats
    assert phases_of([0.001, 1.0], [A, B], 100) == [Phase(100, B)]  # no sample
    assert phases_of([0.5, 1.0], [A, A], 100) == [Phase(100, A)]


@pytest.mark.parametrize(
    ("configured", "consumed", "expected"),
    [
        pytest.param([(60, A), (100, B)], 30, [(60, A), (100, B)], id="the same"),
        pytest.param([(60, A), (100, B)], 60, [(60, A), (100, B)], id="at the border"),
        pytest.param([(60, A), (100, B)], 80, [(60, A), (100, B)], id="in the second"),
        pytest.param([(60, A), (200, B)], 80, [(60, A), (200, B)], id="longer: the phase goes on"),
        pytest.param([(120, A), (200, B)], 80, [(60, A), (80, B), (120, A), (200, B)], id="twice as long: the first again"),
        pytest.param([(100, C)], 30, [(30, A), (100, C)], id="other weights"),
        pytest.param([(100, A)], 30, [(100, A)], id="the second phase is gone"),
        pytest.param([(20, A), (100, B)], 30, [(30, A), (100, B)], id="the second starts at once"),
        pytest.param([(50, A)], 80, [(60, A), (80, B)], id="shorter than what is done"),
    ],
)
def test_a_continued_run_keeps_its_past_and_takes_the_phases_that_are_configured(configured, consumed, expected):
    saved = [Phase(60, A), Phase(100, B)]
    assert continued(saved, [Phase(*each) for each in configured], consumed) == [Phase(*each) for each in expected]

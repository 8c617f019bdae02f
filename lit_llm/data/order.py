"""The order of training samples: a pure function of (seed, epoch, position), computed when it is needed and never stored.

Global sample number ``g`` = 0, 1, 2, ... counts the samples of the whole run over all ranks. Sample number ``g`` lies in data
epoch ``g // samples`` at position ``g % samples``. The epoch's permutation maps that position to a sample. The order does not
depend on the number of ranks, workers or the micro-batch size. The only state of a run is the number of samples it has read.
"""

from __future__ import annotations

import numpy as np

SORTED_UP_TO = 256
"""Sets of at most this many elements are permuted by sorting random keys.

For small sets, the Feistel network is visibly not uniform. Over 400,000 epochs of 7 elements, a chi-square test of all 5,040
orders is 1,209 standard deviations off. Over 2,000,000 epochs, a test of pairs of positions is 39 standard deviations off with
12 elements and 18 off with 16; a test of single positions is 3.5 off with 24. From 32 elements on, neither differs from chance.
"""
_ROUNDS = 8  # as in the stateless shuffles of grain and levanter; Luby-Rackoff needs four
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the odd step of SplitMix64


def permute(index: np.ndarray, *, size: int, seed: int, epoch: int | np.ndarray) -> np.ndarray:
    """Apply the pseudo-random permutation of ``range(size)`` for ``(seed, epoch)``.

    Up to ``SORTED_UP_TO`` elements are sorted by a hash of the seed, the epoch and the element, so every order is equally
    likely. The sort takes O(size) memory for each distinct epoch.

    More elements are permuted by a Feistel network over the smallest power of two that is at least ``size``, in O(1) for each
    index. The network is a bijection for any round function. Results outside ``range(size)`` are mapped again until they fall
    inside ("cycle-walking"), which keeps the map a bijection on ``range(size)`` and takes fewer than two passes on average. (A
    linear congruential map would be cheaper, but its output has regular strides.)

    Args:
        index: (n,) integers in [0, size).
        size: number of elements, 1 <= size < 2**63.
        seed: any integer (taken modulo 2**64).
        epoch: one non-negative integer for all indices, or (n,), one for each index.

    Returns:
        (n,) int64 in [0, size).

    Raises:
        ValueError: if ``size`` is below one or an index lies outside [0, size).
    """
    if not 1 <= size < 2**63:
        raise ValueError(f"A permutation needs 1 <= size < 2**63, but size is {size}.")
    index = np.asarray(index)
    if index.size and not (index.min() >= 0 and index.max() < size):
        raise ValueError(f"An index lies outside [0, {size}).")

    seed_key = _mix(np.array([seed & _MASK], dtype=np.uint64))  # (1,)
    epochs = np.broadcast_to(np.asarray(epoch).astype(np.uint64), index.shape)  # (n,)
    if size <= SORTED_UP_TO:
        distinct, which = np.unique(epochs, return_inverse=True)  # (e,), (n,)
        return _sorted(_mix(distinct ^ seed_key), size)[which, index]
    values = index.astype(np.uint64)  # (n,)
    keys = _mix(epochs ^ seed_key)  # (n,) one key per epoch
    bits = (size - 1).bit_length()
    out = _feistel(values, keys, bits)
    while (outside := np.flatnonzero(out >= np.uint64(size))).size:
        out[outside] = _feistel(out[outside], keys[outside], bits)
    return out.astype(np.int64)


def sample_index(g: np.ndarray, *, samples: int, seed: int) -> np.ndarray:
    """The index of the sample that each global sample number ``g`` reads.

    Args:
        g: (n,) non-negative integers; they may span any number of data epochs.
        samples: samples in one data epoch (M).
        seed: the run's data seed.

    Returns:
        (n,) int64 in [0, samples).
    """
    g = np.asarray(g, dtype=np.int64)
    return permute(g % samples, size=samples, seed=seed, epoch=g // samples)


def _sorted(keys: np.ndarray, size: int) -> np.ndarray:
    """One permutation of ``range(size)`` for each of the ``keys`` (e,) uint64: (e, size) int64.

    The elements are sorted by the first ``size`` numbers of a SplitMix64 generator that starts at the key. If two numbers were
    equal (the chance is below 1e-14), their elements would stay in order.
    """
    steps = np.arange(size, dtype=np.uint64) * np.uint64(_GOLDEN)
    return np.argsort(_mix(keys[:, None] + steps), axis=1, kind="stable")


def _feistel(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Permute numbers below 2**bits: map each of ``values`` (n,) uint64 by the permutation that its key in ``keys`` selects.

    The rounds change the high and the low half of the bits in turn. Halves cannot be swapped: their widths differ if ``bits``
    is odd.
    """
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for round_number in range(_ROUNDS):
        constant = np.uint64(_GOLDEN * (round_number + 1) & _MASK)
        if round_number % 2 == 0:
            high = high ^ (_mix((low ^ keys) + constant) & high_mask)
        else:
            low = low ^ (_mix((high ^ keys) + constant) & low_mask)
    return (high << low_bits) | low


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash each of (n,) uint64 to a uint64 by SplitMix64's finaliser (Steele, Lea, Flood 2014), which mixes all bits."""
    x = x + np.uint64(_GOLDEN)  # uint64 arrays wrap around, as intended
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

"""Dropout: masks that look random, gradients, and equal masks for any part of a model, a sequence or a layer."""

import pytest
import torch

from lit_llm.models.dropout import SITES, drop, drop_weights, hashed, kept, make_drops

T, WIDTH = 256, 512


def drops_of(seed=1, layers=2, batch=4, positions=None, width=WIDTH):
    positions = torch.arange(T) if positions is None else positions
    return make_drops(torch.tensor(seed), layers=layers, batch=batch, positions=positions, width=width)


def mask(rate, layer=0, site=1, **settings):
    """(B, T, d) float64: zeros and ones."""
    drops = drops_of(**settings).of(layer)
    return kept(hashed(drops.rows, drops.keys[site]), drops.numbers, rate).double()


def test_a_mask_is_the_hash_that_integers_of_python_give():
    """Products wrap around at 64 bits in every kernel of torch, vectorised or not."""
    word = 2**64 - 1

    def mix(x):
        x = x * 0x9E3779B97F4A7C15 & word
        x ^= x >> 32 | (word << 32 & word if x >> 63 else 0)  # the sign is shifted in
        return x * 0xBF58476D1CE4E5B9 & word

    def scramble(x):
        return mix(mix(x + 0xBF58476D1CE4E5B9 & word))

    seed, rate, found = 2**61 + 12345, 0.3, {}
    whole = mask(rate, layer=1, site=2, seed=seed)
    for row, position, channel in [(0, 0, 0), (3, 255, 511), (1, 17, 300), (2, 200, 5), (0, 3, 2), (3, 9, 77)]:
        start = scramble(seed)
        key = scramble(start + 1 * len(SITES) + 2 & word)
        of_row = mix(scramble(scramble(-1 - row & word) + position & word) ^ key)
        product = of_row * scramble(channel - start & word) & word
        signed = product - 2**64 if product >> 63 else product
        found[row, position, channel] = float(signed >= rate * 2**64 - 2**63)
        assert whole[row, position, channel] == found[row, position, channel]
    assert set(found.values()) == {0.0, 1.0}


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.8])
def test_masks_look_like_independent_draws(rate):
    """Of 524,288 values: their rate; sums of rows and columns; pairs of neighbours, layers, sites, rows and seeds.

    Bounds are 6 standard deviations of independent draws: one of these 60 numbers is beyond with a chance of 1e-7.
    """
    count = 4 * T * WIDTH
    whole = mask(rate)
    z = (whole - (1 - rate)) / (rate * (1 - rate)) ** 0.5  # mean 0, variance 1
    assert abs(float(z.sum())) < 6 * count**0.5
    others = {
        "position": z.roll(1, 1),
        "channel": z.roll(1, 2),
        "position and channel": z.roll((1, 1), (1, 2)),
        "row": z.roll(1, 0),
        **{
            name: (mask(rate, **where) - (1 - rate)) / (rate * (1 - rate)) ** 0.5
            for name, where in {
                "layer": {"layer": 1},
                "embedding": {"layer": -1},
                "site": {"site": 2},
                "seed": {"seed": 2},
            }.items()
        },
    }
    for name, other in others.items():
        assert abs(float((z * other).sum())) < 6 * count**0.5, name
    # A product of two numbers could show in squares of 2 x 2 places.
    squares = z * z.roll(1, 1) * z.roll(1, 2) * z.roll((1, 1), (1, 2))
    assert abs(float(squares.sum())) < 6 * count**0.5
    for dims in ((0, 1), (2,)):  # sums of columns, of rows: variance 1
        sums = z.sum(dims).flatten() / (z.numel() / z.sum(dims).numel()) ** 0.5
        excess = float(sums.square().mean()) - 1
        kurtosis = 2 + (1 / (rate * (1 - rate)) - 6) * sums.numel() / count  # variance of a squared sum of draws
        assert abs(excess) < 6 * (kurtosis / sums.numel()) ** 0.5
    correlations = torch.corrcoef(z.flatten(0, 1).T)[~torch.eye(WIDTH, dtype=torch.bool)]  # of channels
    assert abs(float(correlations.square().mean()) * 4 * T - 1) < 0.03 and correlations.abs().max() < 8 / (4 * T) ** 0.5


def test_any_part_is_dropped_as_it_is_in_the_whole():
    """Of positions, channels, heads, keys and layers: what ranks hold."""
    whole, some = drops_of(layers=8), torch.tensor([3, 4, 5, 250, 251])
    part = drops_of(layers=8, positions=some)
    x = torch.ones(4, T, WIDTH)
    y = drop(x, 0.4, whole.of(5), 1)
    assert torch.equal(drop(x[:, some], 0.4, part.of(5), 1), y[:, some])
    assert torch.equal(drop(x[..., 64:96], 0.4, whole.of(5), 1, first=64), y[..., 64:96])
    of_rank = whole._replace(stream=whole.rows[:, 128:192])
    assert torch.equal(drop(x[:, 128:192], 0.4, of_rank.of(5), 1), y[:, 128:192])
    assert torch.equal(drop(x, 0.4, of_rank.of(5), 1, stream=False), y)

    def weights(drops, *heads, keys=T, first=0):
        found = drop_weights(drops.of(5), 0.4, *heads, keys, first_head=first)
        return kept(hashed(found.rows[:, None], found.heads[:, None]), found.columns, 0.4)  # (B, H, T, S)

    of_all = weights(whole, 6)
    assert torch.equal(weights(part, 2, keys=252, first=4), of_all[:, 4:6][:, :, some, :252])
    assert not torch.equal(of_all[:, 0], of_all[:, 1])


def test_gradients_are_masked_and_scaled_as_values_are_and_no_mask_is_saved():
    x = torch.randn(4, T, 300, dtype=torch.float64, requires_grad=True)
    gradient, drops, saved = torch.randn_like(x), drops_of().of(0), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = drop(x, 0.25, drops, 1)
    keep = mask(0.25)[..., :300]
    torch.testing.assert_close(y, x * keep / 0.75, rtol=1e-15, atol=0)  # divided, or multiplied by the inverse
    (found,) = torch.autograd.grad(y, x, gradient)
    torch.testing.assert_close(found, gradient * keep / 0.75, rtol=1e-15, atol=0)
    shared = {t.untyped_storage().data_ptr() for t in drops}
    assert all(t.untyped_storage().data_ptr() in shared for t in saved)
    assert drop(x, 0.0, drops, 1) is x and drop(x, 0.25, None, 1) is x
    assert drop(x.bfloat16(), 0.25, drops, 1).dtype == torch.bfloat16

"""The ladder's optimizers against their formulas in float64."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from ladder_optimizers import CautiousMuonAdamW, QuinticsMuonAdamW, ScheduleFreeAdamW, SoapAdamW

sys.path.pop()  # benchmarks/clean.py would hide tests/clean

STEPS = 4
SHAPES = [(6, 10), (10, 6), (8, 8)]


def drawn(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def visited(make, shape, dtype=torch.float64):
    """Parameters after each step, in a group named matrix."""
    p = nn.Parameter(torch.tensor(drawn(shape, 0), dtype=dtype))
    optimizer, found = make([{"name": "matrix", "params": [p]}]), []
    for t in range(1, STEPS + 1):
        p.grad = torch.tensor(drawn(shape, t), dtype=dtype)
        optimizer.step()
        found.append(p.detach().double().numpy().copy())
    return found, optimizer, p


@pytest.mark.parametrize("shape", SHAPES)
def test_cautious_decay_follows_its_formula(shape):
    lr, decay, mu = 0.02, 0.5, 0.95
    found, _, _ = visited(lambda groups: CautiousMuonAdamW(groups, lr=lr, weight_decay=decay), shape)
    theta, m = drawn(shape, 0), 0.0
    for t in range(1, STEPS + 1):
        g = drawn(shape, t)
        m = mu * m + (1 - mu) * g
        u, s, vh = np.linalg.svd(mu * m + (1 - mu) * g, full_matrices=False)
        s = s / np.linalg.norm(s)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5  # Jordan et al. 2024
        update = math.sqrt(max(1, shape[0] / shape[1])) * u * s @ vh
        theta = theta - lr * (update + decay * (update * theta > 0) * theta)
        np.testing.assert_allclose(found[t - 1], theta, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_quintics_act_on_the_singular_values(shape):
    lr, quintics = 0.02, [(4.0, -6.0, 2.5), (1.875, -1.25, 0.375)]
    found, _, _ = visited(lambda groups: QuinticsMuonAdamW(groups, quintics=quintics, lr=lr, weight_decay=0.0), shape)
    u, s, vh = np.linalg.svd(drawn(shape, 1), full_matrices=False)  # the first direction is a multiple of the gradient
    s = s / np.linalg.norm(s)
    for a, b, c in quintics:
        s = a * s + b * s**3 + c * s**5
    expected = drawn(shape, 0) - lr * math.sqrt(max(1, shape[0] / shape[1])) * u * s @ vh
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-7)


def test_cautious_decay_of_an_adamw_group_decays_where_the_update_goes_the_same_way():
    lr, decay = 0.02, 0.5
    p = nn.Parameter(torch.tensor(drawn((8,), 0)))
    start = p.detach().clone()
    p.grad = torch.tensor(drawn((8,), 1))
    CautiousMuonAdamW([{"name": "vector", "params": [p], "lr": lr}], weight_decay=decay, eps=1e-30).step()
    direction = p.grad.sign()  # AdamW's first update
    torch.testing.assert_close(p.detach(), start - lr * (direction + decay * (direction * start > 0) * start))


def test_schedule_free_follows_its_formula():
    lr, beta1, beta2, decay = 0.1, 0.9, 0.95, 0.2
    found, optimizer, p = visited(lambda groups: ScheduleFreeAdamW(groups, lr=lr, weight_decay=decay), (3, 4))
    x = z = drawn((3, 4), 0)
    v = total = 0.0
    for t in range(1, STEPS + 1):
        y, g = (1 - beta1) * z + beta1 * x, drawn((3, 4), t)
        v = beta2 * v + (1 - beta2) * g**2
        rate = lr * math.sqrt(1 - beta2**t)
        z = z - rate * (g / (np.sqrt(v) + 1e-8) + decay * y)
        total += rate**2
        x = x + rate**2 / total * (z - x)
        np.testing.assert_allclose(found[t - 1], (1 - beta1) * z + beta1 * x, rtol=1e-9)
    optimizer.eval()
    np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-9)
    optimizer.train()
    np.testing.assert_allclose(p.detach().numpy(), found[-1], rtol=1e-9)


def test_soap_is_adam_in_the_basis_of_the_preconditioner():
    lr, beta = 0.01, 0.95
    found, _, _ = visited(lambda groups: SoapAdamW(groups, lr=lr, weight_decay=0.0, every=100), (6, 6))
    first = drawn((6, 6), 1)  # of full rank: the basis is unique up to signs
    left, right = (np.linalg.eigh(x)[1] for x in (first @ first.T, first.T @ first))
    theta, m, v = drawn((6, 6), 0), 0.0, 0.0
    assert np.array_equal(found[0], theta)  # the first step only makes the basis
    for t in range(2, STEPS + 1):
        g = left.T @ drawn((6, 6), t) @ right
        m, v = beta * m + (1 - beta) * g, beta * v + (1 - beta) * g**2
        theta = theta - lr * left @ (m / (1 - beta ** (t - 1)) / (np.sqrt(v / (1 - beta ** (t - 1))) + 1e-8)) @ right.T
        np.testing.assert_allclose(found[t - 1], theta, rtol=1e-6)

"""lit_llm.optim, and the torch optimizers we lean on, against their formulas in float64, step by step."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import Tiny, gradients
from torch import Tensor, nn

from lit_llm.optim import Lion, MuonAdamW, muon, newton_schulz, parameter_groups
from lit_llm.optim.newton_schulz import polynomials
from lit_llm.optim.torch_muon import TorchMuon


def trajectory(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shapes: list[tuple[int, ...]]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Start, and parameters after each of STEPS steps of an optimizer on float32 parameters."""
    generator = torch.Generator().manual_seed(7)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer, visited = make(params), [[p.detach().double() for p in params]]
    for step_gradients in gradients([p.shape for p in params]):
        for p, g in zip(params, step_gradients, strict=True):
            p.grad = g.float()
        optimizer.step()
        visited.append([p.detach().double() for p in params])
    return visited[0], visited[1:]


def assert_follows(
    formula: Callable[[Tensor, Tensor, int, dict[str, Tensor]], Tensor],
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    shapes: list[tuple[int, ...]],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Every step of every parameter: formula(θ, g, t, state) in float64 against the optimizer's float32."""
    thetas, visited = trajectory(make, shapes)
    states: list[dict[str, Tensor]] = [{} for _ in shapes]
    all_gradients = gradients([theta.shape for theta in thetas])
    for t, (found, step_gradients) in enumerate(zip(visited, all_gradients, strict=True), start=1):
        thetas = [formula(*args, t, state) for *args, state in zip(thetas, step_gradients, states, strict=True)]
        for theta, actual in zip(thetas, found, strict=True):
            torch.testing.assert_close(actual, theta, rtol=rtol, atol=atol)


def adamw_formula(theta: Tensor, g: Tensor, t: int, state: dict[str, Tensor], *, lr: float, decay: float) -> Tensor:
    b1, b2, eps = 0.9, 0.95, 1e-8
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g**2
    m_hat, v_hat = state["m"] / (1 - b1**t), state["v"] / (1 - b2**t)
    return theta - lr * m_hat / (v_hat.sqrt() + eps) - lr * decay * theta


JORDAN = [(3.4445, -4.7750, 2.0315)] * 5


def muon_formula(
    theta: Tensor,
    g: Tensor,
    t: int,
    state: dict[str, Tensor],
    *,
    scale: Callable[[int, int], float],
    quintics: Sequence[tuple[float, float, float]] = JORDAN,
    normuon: float | None = None,
) -> Tensor:
    lr, decay, mu = 0.02, 0.1, 0.95
    state["m"] = mu * state.get("m", 0) + (1 - mu) * g
    update = mu * state["m"] + (1 - mu) * g
    # The quintic acts on singular values alone: U p(p(...(S / norm))) Vᵀ, through an SVD and no matrix iteration.
    u, s, vh = torch.linalg.svd(update, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for a, b, c in quintics:
        s = a * s + b * s**3 + c * s**5
    o = (u * s) @ vh
    if normuon is not None:  # arXiv 2510.05491, algorithm 1; the norm is that of O instead of 0.2 √(r c)
        state["v"] = normuon * state.get("v", 0) + (1 - normuon) * (o**2).mean(dim=1)
        n = o / (state["v"].sqrt() + 1e-8)[:, None]
        o = n * (o**2).sum().sqrt() / (n**2).sum().sqrt()
    return (1 - lr * decay) * theta - lr * scale(*theta.shape) * o


def lion_formula(theta: Tensor, g: Tensor, t: int, state: dict[str, Tensor]) -> Tensor:
    lr, decay, b1, b2 = 1e-2, 0.3, 0.9, 0.99
    m = state.get("m", torch.zeros_like(g))
    state["m"] = b2 * m + (1 - b2) * g
    return theta - lr * (torch.sign(b1 * m + (1 - b1) * g) + decay * theta)


SHAPES = [(6, 6), (6, 6), (4, 10), (10, 4), (10,)]
MATRICES = [(6, 6), (6, 6), (4, 10), (10, 4), (1, 5), (32, 8)]


# -- parameter groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_every_trainable_parameter_is_in_exactly_the_group_of_its_role(tied: bool) -> None:
    model = Tiny(tied=tied)
    groups = {group["name"]: {id(p) for p in group["params"]} for group in parameter_groups(model)}
    assert groups == {
        "matrix": {id(m.weight) for m in (model.square, model.up, model.down, model.conv)},
        "embedding": {id(m.weight) for m in (model.embed, model.position, model.head)},
        "vector": {id(model.up.bias), id(model.norm.weight), id(model.norm.bias)},
    }
    assert sum(len(group["params"]) for group in parameter_groups(model)) == (9 if tied else 10)


def test_a_head_tied_to_a_plain_matrix_makes_it_an_embedding() -> None:
    model = nn.Module()
    model.first = nn.Linear(4, 6, bias=False)  # registered under a harmless name before the head
    model.head = nn.Linear(4, 6, bias=False)
    model.head.weight = model.first.weight
    assert [group["name"] for group in parameter_groups(model)] == ["embedding"]


def test_only_vectors_are_exempt_from_decay_and_are_not_decayed() -> None:
    model = Tiny()
    groups = parameter_groups(model)
    assert {group["name"]: group.get("weight_decay") for group in groups} == {
        "matrix": None,
        "embedding": None,
        "vector": 0.0,
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()  # no gradient: only decay moves anything, by 1 - lr * decay
    for name, p in model.named_parameters():
        factor = 0.95 if p.requires_grad and p.ndim >= 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


# -- torch's own, as the recipes use them ------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_torch_adamw_follows_its_formula(fused: bool) -> None:
    assert_follows(
        lambda *args: adamw_formula(*args, lr=1e-2, decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused),
        SHAPES,
    )


# -- Lion --------------------------------------------------------------------------------------------------------------


def test_lion_follows_its_formula() -> None:
    assert_follows(lion_formula, lambda params: Lion(params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.3), SHAPES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("undoable", [False, True])
def test_a_lion_step_of_any_dtype_is_the_formula_in_float64_rounded_once(dtype: torch.dtype, undoable: bool) -> None:
    lr, decay, generator = 0.02, 0.1, torch.Generator().manual_seed(1)  # the decay rounds to 0.996 instead of 0.998 in bf16
    starts, grads = ([torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(2))
    params = [nn.Parameter(start.clone()) for start in starts]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer = Lion(params, lr=lr, weight_decay=decay)
    optimizer.found_inf = torch.zeros(()) if undoable else None
    optimizer.step()
    for p, start, g in zip(params, starts, grads, strict=True):
        exact = ((1 - lr * decay) * start.double() - lr * g.double().sign()).to(dtype)
        if dtype == torch.float32:  # two operations, as before
            exact = start.mul(1 - lr * decay).add(g.sign(), alpha=-lr)
        assert torch.equal(p, exact)


@pytest.mark.parametrize("make", [MuonAdamW, Lion])
def test_decay_of_bf16_parameters_is_exact(make: Any) -> None:
    params = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()) for shape in SHAPES]
    starts = [p.detach().double() for p in params]
    optimizer = make([{"params": params, "lr": 0.02}], weight_decay=0.1)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, start in zip(params, starts, strict=True):
        assert torch.equal(p, (start * (1 - 0.02 * 0.1)).bfloat16())


# -- Muon + AdamW ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adjust_lr", "scale"),
    [
        ("original", lambda rows, columns: math.sqrt(max(1, rows / columns))),
        ("match_rms_adamw", lambda rows, columns: 0.2 * math.sqrt(max(rows, columns))),
    ],
)
def test_muon_follows_its_formula(adjust_lr: Any, scale: Any) -> None:
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "ns_dtype": "float32"}
    assert_follows(
        lambda *args: muon_formula(*args, scale=scale),
        lambda params: MuonAdamW(params, adjust_lr=adjust_lr, **options),
        MATRICES,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("steps", [2, 5])
def test_polar_express_and_normuon_follow_their_formulas(steps: int) -> None:
    options: dict[str, Any] = {"lr": 0.02, "ns_steps": steps, "ns_method": "polar_express", "normuon_beta2": 0.9}
    assert_follows(
        partial(
            muon_formula,
            scale=lambda rows, columns: math.sqrt(max(1, rows / columns)),
            quintics=best_quintics(steps),
            normuon=0.9,
        ),
        lambda params: MuonAdamW(params, **options),
        MATRICES,
        rtol=1e-4,
        atol=1e-4,
    )


def best_quintics(steps: int, low: float = 1e-3, high: float = 1.0) -> list[tuple[float, float, float]]:
    """Amsel et al. 2025, algorithm 1, with the safety factor 1.01: the quintics that are best on what the ones before leave."""
    found = []
    for _ in range(steps):
        a, b, c = best_quintic(max(low, 0.02407327424182761 * high), high)
        ends = [a * x + b * x**3 + c * x**5 for x in (low, high)]
        a, b, c = (2 * coefficient / sum(ends) for coefficient in (a, b, c))  # so that both ends are as far from 1
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
        found.append((a / 1.01, b / 1.01**3, c / 1.01**5))
    return found


def best_quintic(low: float, high: float) -> tuple[float, float, float]:
    """The a x + b x³ + c x⁵ that is nearest to 1 on [low, high], by Remez' exchange: its error alternates at 4 points."""
    points = np.linspace(low, high, 4)
    for _ in range(50):
        matrix = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, _error = np.linalg.solve(matrix, np.ones(4))
        inner = np.sort(np.sqrt(np.roots([5 * c, 3 * b, a]).real))  # where its derivative is 0
        points = np.array([low, *inner, high])
    return a, b, c


@pytest.mark.parametrize("ns_method", ["jordan", "polar_express"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normuon_survives_matrices_and_rows_of_zeros(dtype: torch.dtype, ns_method: Any) -> None:
    params = [nn.Parameter(torch.ones(4, 6, dtype=dtype)) for _ in range(2)]
    optimizer = MuonAdamW(params, weight_decay=0.0, ns_method=ns_method, normuon_beta2=0.95)
    for _ in range(3):
        params[0].grad = torch.zeros(4, 6, dtype=dtype)
        params[1].grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
        params[1].grad[2] = 0.0
        optimizer.step()
    assert torch.equal(params[0].detach(), torch.ones(4, 6, dtype=dtype))
    moved = (params[1].detach() - 1).float().norm(dim=1)
    assert moved[2] == 0 and moved[[0, 1, 3]].min() > 0.5 * moved.max()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("ns_dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_muon_steps_as_torch_muon_does(
    monkeypatch: pytest.MonkeyPatch, ns_dtype: Any, tolerance: float, adjust_lr: Any, nesterov: bool
) -> None:
    dtype = getattr(torch, ns_dtype)
    # torch's always iterates in bf16, where products in another order differ by some percent: compare in float32 too.
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.to(dtype, copy=True))
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "ns_steps": 5}
    _, ours = trajectory(lambda params: MuonAdamW(params, adjust_lr=adjust_lr, ns_dtype=ns_dtype, **options), MATRICES)
    start, theirs = trajectory(lambda params: torch.optim.Muon(params, adjust_lr_fn=adjust_lr, **options), MATRICES)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for i, (actual, expected) in enumerate(zip(a, b, strict=True)):
            moved = (expected - start[i]).norm()
            assert (actual - expected).norm() < tolerance * moved, (step, MATRICES[i])


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "ns_steps": 3}, {"adjust_lr_fn": "match_rms_adamw"},
                                     {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3}], ids=str)  # fmt: skip
def test_torch_muon_with_adamw_has_the_bits_of_both_torch_optimizers(options: Any) -> None:
    settings = {"lr": 0.02, "weight_decay": 0.1, **options}
    _, ours = trajectory(lambda params: TorchMuon(params, **settings), [*MATRICES, (7,), (2, 3, 4)])
    _, muon = trajectory(lambda params: torch.optim.Muon(params[:-2], **settings), [*MATRICES, (7,), (2, 3, 4)])
    adamw = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
    _, rest = trajectory(lambda params: torch.optim.AdamW(params[-2:], **adamw), [*MATRICES, (7,), (2, 3, 4)])
    for found, a, b in zip(ours, muon, rest, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, [*a[:-2], *b[-2:]], strict=True))


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_torch_muon_with_adamw_equals_ours_with_equal_settings(monkeypatch: pytest.MonkeyPatch, adjust_lr: Any) -> None:
    # torch's always iterates in bf16, where products in another order differ by some percent.
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())
    shapes = [*MATRICES, (7,)]
    start, ours = trajectory(
        lambda params: MuonAdamW(params, lr=0.02, adamw_lr=0.02, adjust_lr=adjust_lr, ns_dtype="float32"), shapes
    )
    _, theirs = trajectory(lambda params: TorchMuon(params, lr=0.02, adjust_lr_fn=adjust_lr), shapes)
    for a, b in zip(ours, theirs, strict=True):
        for i, (actual, expected) in enumerate(zip(a, b, strict=True)):
            assert (actual - expected).norm() < 1e-4 * (expected - start[i]).norm(), shapes[i]


def test_adamw_half_equals_torch_adamw_bit_for_bit() -> None:
    def ours(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"name": "embedding", "params": params[:3]},
            {"name": "vector", "params": params[3:], "weight_decay": 0.0},
        ]
        return MuonAdamW(groups, lr=9.0, adamw_lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)

    def theirs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, fused=True)

    for a, b in zip(trajectory(ours, SHAPES)[1], trajectory(theirs, SHAPES)[1], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_groups_get_the_algorithm_of_their_role_and_only_its_options() -> None:
    model = Tiny()
    optimizer = MuonAdamW(parameter_groups(model), lr=0.5, adamw_lr=0.25, weight_decay=0.125)
    found = [
        (group["name"], group["algorithm"], group["lr"], group["weight_decay"], len(group["params"]))
        for group in optimizer.param_groups
    ]
    assert found == [
        ("matrix", "muon", 0.5, 0.125, 3),
        ("matrix_adamw", "adamw", 0.25, 0.125, 1),  # the 3-D weight has no singular values to speak of
        ("embedding", "adamw", 0.25, 0.125, 2),
        ("vector", "adamw", 0.25, 0.0, 3),
    ]
    muon, adamw = optimizer.param_groups[0], optimizer.param_groups[2]
    assert muon.keys() - adamw.keys() == {
        *("momentum", "nesterov", "ns_steps", "ns_dtype", "ns_method", "normuon_beta2", "adjust_lr")
    }
    assert adamw.keys() - muon.keys() == {"betas", "eps", "fused"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_update_has_the_same_bits_whatever_is_updated_with_it(dtype: torch.dtype) -> None:
    # Odd sizes, because kernels for a batch choose by the alignment of each matrix.
    generator = torch.Generator().manual_seed(5)
    starts, grads = ([torch.randn(9, 7, generator=generator).to(dtype) for _ in range(5)] for _ in range(2))

    def updated(chosen: list[int]) -> list[Tensor]:
        params = [nn.Parameter(starts[i].clone()) for i in chosen]
        for i, p in zip(chosen, params, strict=True):
            p.grad = grads[i]
        MuonAdamW(params).step()
        return params

    for i, together in enumerate(updated([0, 1, 2, 3, 4])):
        assert torch.equal(together, updated([i])[0])


@pytest.mark.parametrize("amx", [False, True])
def test_the_default_dtype_of_the_iteration_depends_on_the_device_type_only(monkeypatch: pytest.MonkeyPatch, amx: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    seen: list[torch.dtype] = []

    def recording(x: Tensor, *, dtype: torch.dtype, **options: Any) -> Tensor:
        seen.append(dtype)
        return newton_schulz(x, dtype=dtype, **options)

    monkeypatch.setattr(muon, "newton_schulz", recording)
    for options in ({}, {"ns_dtype": "float32"}, {"ns_dtype": "bfloat16"}):
        p = nn.Parameter(torch.eye(3))
        p.grad = torch.ones(3, 3)
        MuonAdamW([p], **options).step()
    assert seen == [torch.float32, torch.float32, torch.bfloat16]
    assert [muon.newton_schulz_dtype("auto", device) for device in ("cpu", "cuda", "mps")] == [
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_keeps_singular_vectors_and_brings_values_near_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 16, 40, generator=generator) * torch.tensor([1e-6, 1.0, 1e6, 0.0]).view(4, 1, 1)
    o = torch.stack([newton_schulz(matrix, steps=5, dtype=dtype) for matrix in x])
    assert o.dtype == dtype and not o[3].any()
    u, _, vh = torch.linalg.svd(x[:3], full_matrices=False)
    inner = u.mT @ o[:3].float() @ vh.mT  # diagonal if the vectors were kept
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.6 and values.max() < 1.25
    assert (inner - torch.diag_embed(values)).abs().max() < (1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("method", ["jordan", "polar_express"])
@pytest.mark.parametrize("shape", [(16, 16), (16, 33), (16, 80), (80, 16)])
def test_newton_schulz_computes_its_polynomials_of_matrices_of_any_shape(shape: tuple[int, int], method: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    s = torch.logspace(0, -3, 16, dtype=torch.float64)  # so that the first steps magnify the smallest by their slopes at 0
    x = (u * s @ vh).float()
    for steps in (1, 2, 3, 4, 5, 8):
        values = s / s.norm()
        for a, b, c in polynomials(method, steps):
            values = a * values + b * values**3 + c * values**5
        found = newton_schulz(x, steps=steps, dtype=torch.float32, ns_method=method)
        # Rounding in fp32, 6e-8, times the product of the slopes: up to 2e3 until the smallest value is near 1.
        assert (found.double() - u * values @ vh).abs().max() < 1e-4


@pytest.mark.parametrize(
    "make", [MuonAdamW, lambda params: MuonAdamW(params, normuon_beta2=0.9), Lion], ids=["muon", "normuon", "lion"]
)
def test_a_saved_and_loaded_optimizer_continues_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def steps(model: Tiny, optimizer: torch.optim.Optimizer, seed: int) -> None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        for step_gradients in gradients([p.shape for p in trainable], seed=seed):
            for p, g in zip(trainable, step_gradients, strict=True):
                p.grad = g.float()
            optimizer.step()

    model = Tiny()
    optimizer = make(parameter_groups(model))
    steps(model, optimizer, seed=1)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    steps(model, optimizer, seed=2)

    resumed = Tiny()
    resumed_optimizer = make(parameter_groups(resumed))
    file.seek(0)
    saved = torch.load(file, weights_only=True)  # so the state is made of tensors and plain values
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    steps(resumed, resumed_optimizer, seed=2)
    for (name, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(optimizer.state.values(), resumed_optimizer.state.values(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("make", [MuonAdamW, Lion])
def test_step_runs_the_closure_with_gradients_on_and_returns_its_loss(make: Any) -> None:
    p = nn.Parameter(torch.full((2, 2), 3.0))
    optimizer = make([p], lr=0.1, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return float(loss.detach())

    with torch.no_grad():  # Lightning may call step from anywhere
        assert optimizer.step(closure) == 36.0
    assert p.square().sum() < 36.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: MuonAdamW(p, lr=-1.0), r"\(lr\) is -1.0, but must be at least 0"),
        (
            lambda p: MuonAdamW(p, adamw_lr=float("nan")),
            r"\(adamw_lr\) is .nan, but must be a finite number of at least 0",
        ),
        (lambda p: MuonAdamW(p, momentum=1.0), r"\(momentum\) is 1.0, but must be at least 0 and below 1"),
        (
            lambda p: MuonAdamW(p, betas=(0.9, 1.5)),
            r"\(betas\) is 1.5, but must be at least 0 and below 1",
        ),
        (lambda p: MuonAdamW(p, ns_steps=0), r"\(ns_steps\) is 0, but must be at least 1"),
        (lambda p: MuonAdamW(p, ns_dtype="half"), r"\(ns_dtype\) is 'half', but must be auto, float32 or bfloat16"),
        (lambda p: MuonAdamW(p, ns_method="best"), r"\(ns_method\) is 'best', but must be jordan or polar_express"),
        (
            lambda p: MuonAdamW(p, normuon_beta2=1.0),
            r"\(normuon_beta2\) is 1.0, but must be at least 0 and below 1 or null",
        ),
        (lambda p: MuonAdamW(p, adjust_lr="both"), r"\(adjust_lr\) is 'both', but must be original or match_rms_adamw"),
        (
            lambda p: TorchMuon(p, adjust_lr_fn="both"),
            r"\(adjust_lr_fn\) is 'both', but must be original, match_rms_adamw or null",
        ),
        (lambda p: Lion(p, weight_decay=-0.1), r"\(weight_decay\) is -0.1, but must be at least 0"),
        (lambda p: Lion(p, betas=(-0.1, 0.9)), r"\(betas\) is -0.1"),
    ],
)
def test_options_out_of_range_are_refused_by_name(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(2, 2))])

"""Our optimizers with `found_inf`: the step that is none, decided on the device."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tiny_model import Tiny, gradients
from torch import Tensor, nn

from lit_llm.optim import Lion, MuonAdamW, parameter_groups
from lit_llm.optim.torch_muon import TorchMuon

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Parameters and state as integers: NaN equals itself and -0.0 is not 0.0."""
    state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    return [tensor.detach().view(BITS[tensor.dtype]).tolist() for tensor in [*model.parameters(), *state]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        MuonAdamW,
        lambda params: MuonAdamW(params, nesterov=False),
        lambda params: MuonAdamW(params, normuon_beta2=0.9),
        Lion,
        TorchMuon,
    ],
    ids=["muon", "muon without nesterov", "normuon", "lion", "torch muon"],
)
def test_a_step_with_found_inf_changes_nothing_and_a_step_without_it_is_ordinary(make: Any, dtype: torch.dtype) -> None:
    model = Tiny().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.view(-1)[::3] = -0.0  # the sum with 0.0 would lose the sign
    twin = copy.deepcopy(model)
    optimizer, ordinary = make(parameter_groups(model)), make(parameter_groups(twin))
    trainable = [[p for p in m.parameters() if p.requires_grad] for m in (model, twin)]
    for step, step_gradients in enumerate(gradients([p.shape for p in trainable[0]])):
        for spoilt in (math.nan, math.inf, -math.inf, 1000.0, 0.0) if step else ():
            for p, g in zip(trainable[0], step_gradients, strict=True):
                p.grad = (g * spoilt).to(dtype)
            before = bits(model, optimizer)
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            assert bits(model, optimizer) == before
        for params in trainable:
            for p, g in zip(params, step_gradients, strict=True):
                p.grad = g.to(dtype)
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        ordinary.step()
        assert bits(model, optimizer) == bits(twin, ordinary)


@pytest.mark.parametrize("make", [MuonAdamW, Lion])
def test_a_first_step_with_found_inf_leaves_a_fresh_state(make: Any) -> None:
    model = Tiny()
    twin = copy.deepcopy(model)
    optimizer, ordinary = make(parameter_groups(model)), make(parameter_groups(twin))
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan) if p.requires_grad else None
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    del optimizer.found_inf  # the class's None shows again
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = q.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    ordinary.step()
    assert bits(model, optimizer) == bits(twin, ordinary)


@pytest.mark.parametrize("make", [MuonAdamW, Lion])
def test_without_found_inf_nothing_is_copied(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError

    optimizer = make([nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))])
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    monkeypatch.setattr(torch, "where", refuse)
    monkeypatch.setattr(Tensor, "clone", refuse)
    optimizer.step()
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(AssertionError):
        optimizer.step()

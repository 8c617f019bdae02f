"""Our optimizers with `found_inf`: the step that is none, decided on the device."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tiny_model import Tiny, gradients
from torch import nn

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

"""Plans of users' modules, beside real training steps measured by torch, and what a plan says that it cannot know."""

import re
from dataclasses import replace

import pytest
import torch
from own_cases import CASES, settings, step_of
from torch import nn
from training_step import predict

from lit_llm.core.errors import UserError
from lit_llm.models.custom import Architecture
from lit_llm.optim import Lion, MuonAdamW, parameter_groups
from lit_llm.plan import Optimizer, find, make_plan
from lit_llm.plan import own_trace as planner
from lit_llm.plan.compute import flops_per_token
from lit_llm.plan.weights import OwnModel
from lit_llm.reporting.plan_text import markdown

CPU, GPU = find("cpu"), find("a100-80gb")


def compared(name, **sizes):
    """Predicted and measured parameters, bytes and FLOPs of a step."""
    run = settings(name, **sizes)
    step = step_of(run)
    return predict(run, cuda=False), (step.parameters(), step.peak_bytes(), step.flops())


@pytest.mark.parametrize("name", ["Convolutional", "Shared", "LoopGRU"])
def test_memory_and_flops_of_any_module_are_those_of_a_real_step(name):
    predicted, measured = compared(name, sequences=5, length=16, width=64)
    assert predicted[0] == measured[0] and predicted[2] == measured[2]
    assert predicted[1] == pytest.approx(measured[1], rel=5e-3)


class OfAnyDimension(nn.Module):
    """Weights of no, one, two, three and four dimensions, and a frozen one."""

    def __init__(self, vocab_size: int, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.one = nn.Conv1d(width, width, 3, padding=2)
        self.two = nn.Conv2d(1, 2, (3, 1), padding=(1, 0))
        self.scale = nn.Parameter(torch.ones(()))
        self.mlp = nn.Linear(width, width)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids):
        x = self.embedding(input_ids) * self.frozen
        x = self.one(x.mT)[..., : input_ids.size(1)].mT
        return self.head(self.mlp(self.two(x[:, None]).mean(dim=1) * self.scale))


@pytest.mark.parametrize("kind", [MuonAdamW, torch.optim.Adafactor, torch.optim.AdamW, Lion])
def test_weights_of_any_dimension_have_the_state_that_the_optimizer_keeps(kind):
    run = replace(settings("LSTM", sequences=2, length=16), model=config("OfAnyDimension"), optimizer=Optimizer(kind.__name__))
    module = Architecture(f"{__name__}.OfAnyDimension", {}).build(40)
    optimizer = kind(parameter_groups(module))
    module(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    kept = sum(value.numel() * 4 for state in optimizer.state.values() for name, value in state.items() if name != "step")
    plan = make_plan(run, GPU)
    assert plan.memory.is_known and plan.memory.parts["optimizer state"] == kept


def test_a_module_without_trained_parameters_is_planned_without_activations():
    plan = make_plan(replace(settings("LSTM", sequences=2, length=16), model=config("Frozen")), GPU)
    assert plan.trained_parameters == 0 and "optimizer state" not in plan.memory.parts
    assert "depend on no parameter that is trained" in plan.memory.notes[0]


class Frozen(OfAnyDimension):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.empty = nn.Parameter(torch.ones(0, 24))
        self.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_memory_and_flops_of_many_architectures_are_those_of_a_real_step(name):
    predicted, measured = compared(name, sequences=4, length=128)
    assert predicted[0] == measured[0] and predicted[2] == measured[2]
    # Work memory of LSTM layers is oneDNN's, which chooses kernels by the processor.
    assert predicted[1] == pytest.approx(measured[1], rel=0.1 if CASES[name][0] in ("LSTM", "NeedsData") else 0.01)


def test_the_flops_of_an_lstm_are_six_for_each_element_of_its_matrices():
    run = settings("LSTM", sequences=4, length=16, width=24, n_layer=2)
    matrices = 2 * (4 * 24 * 24 * 2) + 24 * 1000  # input and hidden weights of two layers, and the head
    assert flops_per_token(run.model).total == 6 * matrices


def test_a_loop_over_many_positions_has_its_flops_from_short_sequences_and_unknown_activations(monkeypatch):
    run = settings("LoopGRU", sequences=3, length=2048, width=24)
    matrices = 2 * (3 * 24 * 24) + 24 * 1000  # input and hidden weights of the cell, and the head
    first_state = 2 * 3 * 24 * 24 / 2048  # needs no gradient
    assert flops_per_token(run.model, length=2048).total == pytest.approx(6 * matrices - first_state, rel=1e-9)
    monkeypatch.setattr(planner, "MOST_OPERATIONS", 2_000)
    (note,) = make_plan(run, CPU).memory.notes
    assert "it takes more than 2,000 operations" in note


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ReadsValues", r"it reads a value of a tensor .* \(own_architectures.py, line \d+\)"),
        ("SelectsByValue", r"it selects elements by a mask, so sizes depend on the data \(own_architectures.py, line \d+\)"),
    ],
)
def test_what_depends_on_data_is_said_and_the_rest_is_planned(name, why):
    run = settings(name, sequences=4, length=16, width=32)
    plan = make_plan(run, GPU)
    module = Architecture(f"own_architectures.{name}", {"width": 32}).build(1000)
    count = sum(p.numel() for p in module.parameters())
    assert plan.parameters == count and plan.flops.total == 6 * count
    assert plan.memory.parts["weights"] == 4 * count and plan.memory.parts["optimizer state"] == 8 * count
    assert plan.fits is None and plan.largest_micro_batch is None and plan.most_memory is None and plan.band is None
    (note,) = plan.memory.notes
    assert re.search(why, note)
    page = markdown(plan)
    assert note in page and "activations are unknown" in page and "assumed: six per parameter" in page


class ReadsPositions(nn.Module):
    """Control flow that depends on no data, only on positions."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        positions = torch.arange(input_ids.size(1))
        if (positions.diff() == 1).all():
            x = x + x.mean(dim=1, keepdim=True)
        return x @ self.embedding.weight.T


class Breaks(nn.Module):
    def __init__(self, vocab_size: int, how: str = "") -> None:
        super().__init__()
        if how == "constructor":
            raise ValueError("width must be even")
        self.table = nn.Embedding(vocab_size, 8)
        self.how = how

    def forward(self, input_ids):
        z = self.table(input_ids) @ self.table.weight.T
        if self.how == "shapes":
            return z @ torch.zeros(3, 3)
        return z[:, -1]


def config(kind, **arguments):
    return OwnModel(vocab_size=40, block_size=16, architecture=Architecture(f"{__name__}.{kind}", arguments))


def test_values_that_depend_on_no_data_are_known():
    run = replace(settings("LSTM", sequences=3, length=16), model=config("ReadsPositions"))
    step = step_of(run)
    assert predict(run, cuda=False)[1] == pytest.approx(step.peak_bytes(), rel=5e-3)
    assert make_plan(run, CPU).memory.is_known


def test_a_broken_module_is_reported_in_a_sentence():
    run = settings("LSTM", sequences=2, length=16)
    with pytest.raises(UserError, match=r"Breaks cannot be built: width must be even \(--architecture"):
        make_plan(replace(run, model=config("Breaks", how="constructor")), CPU)
    with pytest.raises(UserError, match=r"returns torch.float32 of shape \(2, 40\) for input_ids of shape \(2, 16\)"):
        make_plan(replace(run, model=config("Breaks")), CPU)
    (note,) = make_plan(replace(run, model=config("Breaks", how="shapes")), CPU).memory.notes
    assert "it fails on tensors without data: RuntimeError:" in note and "(test_custom_plan.py, line" in note

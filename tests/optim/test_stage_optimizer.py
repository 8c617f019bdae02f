"""The optimizer of a pipeline stage."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from lit_llm.optim import Lion, MuonAdamW, parameter_groups
from lit_llm.optim.transfer import optimizer_of_stage

OPTIMIZERS = {
    "MuonAdamW": MuonAdamW,
    "Lion": lambda groups: Lion(groups, lr=1e-2),
    "AdamW fused": lambda groups: optim.AdamW(groups, lr=1e-2, fused=True),
    **{
        made.__name__: partial(made, lr=1e-2)
        for made in (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.SGD, optim.RMSprop, optim.Adagrad)
    },
    **{made.__name__: partial(made, lr=1e-2) for made in (optim.Adadelta, optim.ASGD, optim.Rprop, optim.Adafactor)},
}


def model():
    torch.manual_seed(0)
    parts = {"embedding": nn.Embedding(6, 4), "first": nn.Linear(4, 4), "second": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    return nn.ModuleDict(parts)


def one_step(optimizer, parameters):
    for name, p in parameters.items():
        p.grad = torch.full_like(p, 0.01 * len(name)) + torch.eye(*p.shape) if p.ndim == 2 else torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("held", [["embedding", "first"], ["second"], ["norm"]], ids=str)
def test_a_stage_has_all_groups_and_updates_what_it_holds_as_one_process_does(name, held):
    whole = model()
    reference = OPTIMIZERS[name](parameter_groups(whole))
    names = {p: n for n, p in whole.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in reference.param_groups]
    one_step(reference, dict(whole.named_parameters()))

    staged = model()
    for part, module in staged.items():
        if part not in held:
            module.to("meta")
    optimizer, numbered = optimizer_of_stage(OPTIMIZERS[name], staged)
    assert numbered == groups
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert options == [{k: v for k, v in group.items() if k != "params"} for group in reference.param_groups]
    own = {n: p for n, p in staged.named_parameters() if n.split(".")[0] in held}
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(own.values())
    one_step(optimizer, own)
    assert optimizer.state.keys() <= set(own.values())
    for n, p in own.items():
        torch.testing.assert_close(p, whole.get_parameter(n), rtol=0, atol=0)

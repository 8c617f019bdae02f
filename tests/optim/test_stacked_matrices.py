"""Muon's step for stacked matrices of experts, against its steps for each matrix alone."""

import pytest
import torch
from torch import nn

from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.optim import MuonAdamW
from lit_llm.optim.parameter_groups import parameter_groups
from lit_llm.optim.torch_muon import TorchMuon

OPTIONS = {
    "jordan": (MuonAdamW, {}),
    "normuon": (MuonAdamW, {"normuon_beta2": 0.9, "ns_dtype": "bfloat16", "adjust_lr": "match_rms_adamw"}),
    "torch": (TorchMuon, {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_stack_moves_as_its_matrices_do_bit_for_bit(name):
    optimizer, options = OPTIONS[name]
    generator = torch.Generator().manual_seed(0)
    whole = nn.Parameter(torch.randn(3, 10, 6, generator=generator))
    alone = [nn.Parameter(each.clone()) for each in whole.detach()]
    stacked = optimizer([{"params": [whole], "name": "experts"}], weight_decay=0.1, **options)
    single = optimizer([{"params": alone, "name": "matrix"}], weight_decay=0.1, **options)
    for step in range(4):
        whole.grad = torch.randn(3, 10, 6, generator=generator) * 10.0**step
        for each, grad in zip(alone, whole.grad, strict=True):
            each.grad = grad.clone()
        stacked.step()
        single.step()
    assert all(torch.equal(a, b) for a, b in zip(whole.detach(), alone, strict=True))
    assert not torch.equal(whole.detach()[0], whole.detach()[1])


def test_experts_have_a_group_and_muon_takes_no_other_tensor_of_three_dimensions():
    moe = {"experts": 4, "expert_width": 16, "router_bias": True, "shared_experts": 1}
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=30, bias=True, mlp="swiglu", moe=moe))
    name_of = {p: name for name, p in model.named_parameters()}
    groups = {group["name"]: {name_of[p] for p in group["params"]} for group in parameter_groups(model)}
    assert groups["experts"] == {f"blocks.0.mlp.{name}.weight" for name in ("up", "gate", "project")}
    assert {"blocks.0.mlp.router.weight", "blocks.0.mlp.shared.up.weight"} <= groups["matrix"]
    assert {f"blocks.0.mlp.{name}.bias" for name in ("up", "gate", "project", "router")} <= groups["vector"]
    algorithms = {group["name"]: group["algorithm"] for group in MuonAdamW(parameter_groups(model)).param_groups}
    assert algorithms["experts"] == algorithms["matrix"] == "muon" and algorithms["vector"] == "adamw"
    convolution = nn.Parameter(torch.zeros(4, 4, 3))
    assert MuonAdamW([{"params": [convolution], "name": "matrix"}]).param_groups[0]["algorithm"] == "adamw"

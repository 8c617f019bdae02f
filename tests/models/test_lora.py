"""LoRA: the formula, what is trained, the initial draw, precision. peft computes the same: tests/hf/test_peft.py."""

import math

import pytest
import torch
import torch.nn.functional as F

from lit_llm.core.errors import UserError
from lit_llm.models.dropout import make_drops
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.lora import (
    LoRAConfig,
    LoRALinear,
    MergedTensor,
    apply_lora,
    flops_saved,
    merged_weights,
    rank_problem,
    target_problems,
    trainable,
)
from lit_llm.optim import MuonAdamW, parameter_groups

SIZE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 64, "mlp_width": 48}
GPT2 = {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False}
# rank * (inputs + outputs) of each layer by hand: query and project 32 + 32, key and value 32 + 16, MLP 32 + 48.
PARAMETERS = {
    "all": (None, {}, 2 * 4 * (2 * 64 + 2 * 48 + 2 * 80)),
    "all, with a gate": (None, {"mlp": "swiglu"}, 2 * 4 * (2 * 64 + 2 * 48 + 3 * 80)),
    "query and value, tied, biases": (["query", "value"], GPT2, 2 * 4 * (64 + 48)),
    "one of the two called project": (["attention.project"], {}, 2 * 4 * 64),
}


def build(lora: LoRAConfig, **settings) -> GPT:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**SIZE, "zero_init_projections": False, **settings}))
        apply_lora(model, lora)
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def fill(model: GPT) -> None:
    """Adapters that matter."""
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.5)


@pytest.mark.parametrize("case", PARAMETERS)
def test_only_adapters_of_the_targets_are_trained_and_base_names_stay(case):
    targets, settings, expected = PARAMETERS[case]
    model = build(LoRAConfig(rank=4, targets=targets), **settings)
    plain = GPT(GPTConfig(**{**SIZE, **settings}))
    own = dict(model.named_parameters())
    assert [name for name in own if "lora" not in name] == [name for name, _ in plain.named_parameters()]
    trained = {name: p for name, p in own.items() if p.requires_grad}
    assert all(name.endswith((".lora_a", ".lora_b")) for name in trained)
    assert sum(p.numel() for p in trained.values()) == expected
    assert trainable(model) == (expected, plain.num_parameters() + expected)
    (group,) = parameter_groups(model)
    assert group["name"] == "adapter" and len(group["params"]) == len(trained)
    assert MuonAdamW([group]).param_groups[0]["algorithm"] == "adamw"


def test_the_output_is_that_of_the_formula_and_the_gradients_are_of_adapters_only():
    torch.manual_seed(1)
    base = torch.nn.Linear(5, 7)
    layer = LoRALinear(base, LoRAConfig(rank=3, alpha=6.0), "mlp.up")
    layer.reset_adapter()
    x = torch.randn(2, 4, 5)
    assert torch.equal(layer(x), F.linear(x, base.weight, base.bias)), "B is zero"
    bound = 1 / math.sqrt(5)  # Kaiming's sqrt(6 / ((1 + 5) * inputs))
    assert 0.8 * bound < layer.lora_a.abs().max() <= bound and not layer.lora_b.any()
    with torch.no_grad():
        layer.lora_b.normal_()
    expected = torch.empty(2, 4, 7)
    update = 6.0 / 3 * layer.lora_b @ layer.lora_a  # (o, i)
    for position in range(4):
        for sequence in range(2):
            expected[sequence, position] = (base.weight + update) @ x[sequence, position] + base.bias
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)  # rounding of fp32
    merged = MergedTensor(base.weight, layer.lora_a, layer.lora_b, 2.0)
    torch.testing.assert_close(merged[...], base.weight + update)
    torch.testing.assert_close(merged[2:5, 1:3], (base.weight + update)[2:5, 1:3])


def test_dropout_applies_to_the_inputs_of_adapters_only():
    model = build(LoRAConfig(rank=2, dropout=0.5, targets=["query"]))
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(model.train()(ids), model.eval()(ids)), "B is zero, and the frozen layer drops nothing"
        fill(model)
        assert not torch.equal(model.train()(ids), model.eval()(ids))
        assert torch.equal(model(ids), model(ids)), "eval drops nothing"
    layer = LoRALinear(torch.nn.Linear(1000, 1, bias=False), LoRAConfig(rank=1, alpha=1.0, dropout=0.25), "mlp.up")
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.ones_(layer.lora_a)
    torch.nn.init.ones_(layer.lora_b)
    drops = make_drops(torch.tensor(0), layers=1, batch=1, positions=torch.arange(1), width=1000)
    dropped = float(layer(torch.ones(1, 1, 1000), drops.of(0)).detach())  # kept inputs count 1 / 0.75
    kept = dropped * 0.75
    assert kept == pytest.approx(round(kept), abs=1e-3) and 700 < kept < 800  # 750 +- 3.6 standard deviations of 13.7


def test_a_base_in_bf16_keeps_adapters_in_fp32():
    model = build(LoRAConfig(rank=2))
    fill(model)
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name in before:
            assert parameter.dtype == torch.float32 and torch.equal(parameter, before[name])
        else:
            assert parameter.dtype == torch.bfloat16
    sums = model(torch.arange(16)[None], torch.arange(16)[None])
    sums.loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


def test_a_target_that_does_not_exist_names_the_nearest():
    config = GPTConfig(**SIZE)
    found = target_problems(LoRAConfig(targets=["quary", "query", "attention.projct", "gat"]), config)
    assert [sentence.partition(" (")[0] for sentence in found[:2]] == [
        "lora.targets has 'quary', but the model has no such linear layer; the nearest is query",
        "lora.targets has 'attention.projct', but the model has no such linear layer; the nearest is attention.project",
    ]
    assert len(found) == 3 and found[2].endswith("(--lora.targets; layers: query, key, value, project, up)")
    assert "is empty" in target_problems(LoRAConfig(targets=[]), config)[0]
    theirs = target_problems(LoRAConfig(targets=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]), config)
    assert [sentence.partition("nearest is ")[2].split()[0] for sentence in theirs] == [
        *("query", "value", "attention.project", "up", "mlp.project"),
    ]
    with pytest.raises(UserError, match="nearest is query"):
        apply_lora(GPT(config), LoRAConfig(targets=["quary"]))


def test_a_rank_above_that_of_a_targeted_matrix_is_refused():
    config = GPTConfig(**SIZE)  # key and value: 16 x 32
    assert rank_problem(LoRAConfig(rank=16), config) is None
    assert rank_problem(LoRAConfig(rank=17), config) == (
        "lora.rank is 17, but attention.key is a matrix of 16 x 32, whose rank is at most 16 "
        "(--lora.rank 16, or leave that layer out of --lora.targets)"
    )
    only = ["query", "mlp.project"]
    assert rank_problem(LoRAConfig(rank=32, targets=only), config) is None
    assert "(--lora.rank 32, or" in (rank_problem(LoRAConfig(rank=33, targets=only), config) or "")


def test_flops_leave_out_the_gradients_of_frozen_matrices():
    """By hand: 10,240 parameters of matrices in each of 2 blocks and 64 · 32 of the head; adapters of rank 4 on all layers."""
    matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 * 48) + 64 * 32
    adapters = PARAMETERS["all"][2]
    assert flops_saved(build(LoRAConfig(rank=4))) == 2 * matrices - 6 * adapters
    assert flops_saved(GPT(GPTConfig(**SIZE))) == 0


SPARSE = {"mlp": "swiglu", "moe": MoEConfig(experts=4, top_k=2, expert_width=24, shared_experts=1)}
OF_EXPERTS = ["router", "experts.up", "experts.gate", "mlp.experts.project"]


@pytest.mark.parametrize("targets", [OF_EXPERTS, ["router"], ["experts.project"]])
def test_a_mixture_with_adapters_computes_the_merged_weights(targets):
    config = LoRAConfig(rank=4, targets=targets)
    model = build(config, **SPARSE).double()
    fill(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"blocks.{i}.mlp.{each.rpartition('.')[2]}.lora_{ab}" for i in range(2) for each in targets for ab in "ab"
    }
    plain = GPT(GPTConfig(**{**SIZE, "zero_init_projections": False, **SPARSE})).double()
    own = model.state_dict()
    weights = {name: own[name].clone() for name in plain.state_dict()}
    for name in own:
        if name.endswith("lora_a"):
            a, b = own[name], own[name.replace("lora_a", "lora_b")]
            weights[name.replace("lora_a", "weight")] += config.alpha / 4 * torch.einsum("...or,...ri->...oi", b, a)
    plain.load_state_dict(weights)
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(ids), plain(ids), rtol=1e-10, atol=1e-10)
    merged = merged_weights(
        {n: p for n, p in own.items() if "lora" not in n}, {n: p for n, p in own.items() if "lora" in n}, config
    )
    for name, tensor in merged.items():  # in fp32
        torch.testing.assert_close(tensor[...].double(), weights[name], rtol=1e-5, atol=1e-5)
        box = (slice(1, 3),) * len(tensor.shape)
        torch.testing.assert_close(tensor[box], tensor[...][box], rtol=1e-5, atol=1e-5)


def test_dropout_beside_adapters_of_experts_is_refused():
    config = GPTConfig(**{**SIZE, **SPARSE})
    (problem,) = target_problems(LoRAConfig(rank=4, targets=["experts.up"], dropout=0.1), config)
    assert "mlp.experts.up" in problem and "--lora.dropout 0" in problem
    assert target_problems(LoRAConfig(rank=4, targets=["up"], dropout=0.1), config) == []  # of the shared expert
    model = build(LoRAConfig(rank=4, targets=["up"]), **SPARSE)
    assert not hasattr(model.blocks[0].mlp.up, "lora_a") and hasattr(model.blocks[0].mlp.shared.up, "lora_a")
    assert "4 x 32" in rank_problem(LoRAConfig(rank=8, targets=["router"]), config)

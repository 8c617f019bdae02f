"""The mixture of experts: against a slow implementation of its formulas, transformers' blocks, and a dense MLP."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lit_llm.models.experts import Experts
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.mlp import MLP

SIZE = {"n_layer": 3, "n_head": 2, "n_embd": 24, "block_size": 12, "vocab_size": 29, "zero_init_projections": False}
KINDS = {
    "softmax": {"mlp": "swiglu", "moe": {"experts": 5, "top_k": 2, "expert_width": 20}},
    "not normalised": {"mlp": "relu2", "moe": {"experts": 4, "top_k": 3, "expert_width": 16, "normalise": False, "scale": 2.5}},
    "deepseek": {
        "mlp": "swiglu",
        "moe": {
            **{"experts": 8, "top_k": 3, "expert_width": 12, "shared_experts": 2, "router": "sigmoid", "scale": 1.5},
            **{"groups": 4, "top_groups": 2, "router_bias": True},
        },
    },
    "biases": {"mlp": "gelu", "mlp_bias": True, "moe": {"experts": 3, "top_k": 1, "expert_width": 7, "router_bias": True}},
}


def experts_of(kind: str | dict, dtype: torch.dtype = torch.float64, seed: int = 0) -> Experts:
    """With random parameters and a random bias for the choice."""
    config = GPTConfig(**SIZE, **(KINDS[kind] if isinstance(kind, str) else kind))
    assert not config.problems()
    made, generator = Experts(config).to(dtype), torch.Generator().manual_seed(seed)
    made.router.reset_buffers()
    for p in made.parameters():
        nn.init.normal_(p, std=0.3, generator=generator)
    made.router.choice_bias.uniform_(-0.1, 0.1, generator=generator)
    return made


def slow(experts: Experts, x: torch.Tensor) -> tuple[torch.Tensor, list[list[int]]]:
    """The formulas, token by token: (N, d) → (N, d), and the experts of each token."""
    moe, router, rows, chosen = experts.router.config, experts.router, [], []
    for token in x:
        logits = router.weight @ token + (0 if router.bias is None else router.bias)
        scores = torch.sigmoid(logits) if moe.router == "sigmoid" else torch.exp(logits) / torch.exp(logits).sum()
        biased, size = (scores + router.choice_bias).tolist(), moe.experts // moe.groups
        best = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(moe.groups)]
        groups = sorted(range(moe.groups), key=lambda g: -best[g])[: moe.top_groups or moe.groups]
        allowed = [e for e in range(moe.experts) if e // size in groups]
        own = sorted(allowed, key=lambda e: -biased[e])[: moe.top_k]
        total = sum(scores[e] for e in own) if moe.normalise else 1.0
        y = torch.zeros_like(token)
        for e in own:

            def linear(layer, z, e=e):
                return layer.weight[e] @ z + (0 if layer.bias is None else layer.bias[e])

            up = linear(experts.up, token)
            if experts.gate is not None:
                up = nn.functional.silu(linear(experts.gate, token)) * up
            else:
                up = torch.relu(up) ** 2 if experts.activate.kind == "relu2" else nn.functional.gelu(up, approximate="tanh")
            y = y + moe.scale * scores[e] / total * linear(experts.project, up)
        rows.append(y if experts.shared is None else y + experts.shared(token[None, None])[0, 0])
        chosen.append(sorted(own))
    return torch.stack(rows), chosen


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_the_formulas(kind):
    experts = experts_of(kind)
    x = torch.randn(2, 9, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    direction = torch.randn(2, 9, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    out, sums = experts(x, None, torch.ones(2, 9, dtype=torch.bool))
    leaves = [x, *experts.parameters()]
    found = torch.autograd.grad(out, leaves, direction, retain_graph=True)
    expected, chosen = slow(experts, x.flatten(0, 1))
    wanted = torch.autograd.grad(expected, leaves, direction.flatten(0, 1), allow_unused=True)
    assert (out.flatten(0, 1) - expected).abs().max() <= 1e-12 * expected.abs().max()
    for a, b in zip(found, wanted, strict=True):
        b = torch.zeros_like(a) if b is None else b
        assert (a - b).abs().max() <= 1e-12 * max(1.0, b.abs().max().item())
    assert sums.counts.tolist() == [sum(own.count(e) for own in chosen) for e in range(len(sums.counts))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [16, 18], ids=["grouped", "loop"])  # 18 bf16 or fp32 elements are no multiple of 16 bytes
def test_narrow_products_are_those_of_float64_within_rounding(dtype, width):
    moe = {"experts": 4, "top_k": 2, "expert_width": width}
    exact = experts_of({"mlp": "swiglu", "moe": moe})
    x = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact.load_state_dict({name: value.to(dtype).double() for name, value in exact.state_dict().items()})
    narrow = experts_of({"mlp": "swiglu", "moe": moe}, dtype)
    narrow.load_state_dict(exact.state_dict())
    narrow.router.choice_bias = exact.router.choice_bias.float()
    out, _ = narrow(x, None, None)
    out.sum().backward()  # an expanded gradient
    wanted, _ = exact(x.double(), None, None)
    wanted.sum().backward()
    bound = 8 * torch.finfo(dtype).eps  # a few roundings of values of the size of the largest one
    assert (out - wanted).abs().max() <= bound * wanted.abs().max()
    for a, b in zip(narrow.parameters(), exact.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 4 * bound * b.grad.abs().max()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_blocks_of_transformers_compute_the_same(family):
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 24, "num_experts_per_tok": 3, "hidden_act": "silu"}
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        config = transformers.MixtralConfig(num_local_experts=5, intermediate_size=20, **common)
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        config = transformers.Qwen3MoeConfig(num_experts=5, moe_intermediate_size=20, norm_topk_prob=False, **common)
    config._experts_implementation = "eager"
    theirs = Block(config).eval()
    moe = {"experts": 5, "top_k": 3, "expert_width": 20, "normalise": family == "mixtral"}
    ours = experts_of({"mlp": "swiglu", "moe": moe}, torch.float32)
    ours.router.choice_bias.zero_()
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat((ours.gate.weight, ours.up.weight), dim=1))
        theirs.experts.down_proj.copy_(ours.project.weight)
    x = torch.randn(2, 11, 24, generator=torch.Generator().manual_seed(3))
    wanted = theirs(x)
    assert (ours(x, None, None)[0] - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("top_k", [1, 3])
def test_identical_experts_are_a_dense_mlp(top_k):
    config = GPTConfig(**SIZE, mlp="swiglu", mlp_width=20, moe=MoEConfig(experts=4, top_k=top_k))
    experts, dense = experts_of({"mlp": "swiglu", "mlp_width": 20, "moe": config.moe}, torch.float32), MLP(config)
    with torch.no_grad():
        for name in ("up", "gate", "project"):
            getattr(dense, name).weight.copy_(getattr(experts, name).weight[0])
            getattr(experts, name).weight.copy_(getattr(dense, name).weight.expand_as(getattr(experts, name).weight))
    x = torch.randn(4, 16, 24, generator=torch.Generator().manual_seed(1))
    out, sums = experts(x, None, torch.ones(4, 16, dtype=torch.bool))
    wanted = dense(x)
    assert (sums.counts > 0).all()  # it is not one expert
    if top_k == 1:
        assert torch.equal(out, wanted)
    else:  # weights sum to 1 within a rounding
        assert (out - wanted).abs().max() <= 2 * torch.finfo(torch.float32).eps * wanted.abs().max()


def test_equal_scores_go_to_the_first_experts():
    experts = experts_of({"moe": {"experts": 64, "top_k": 3, "groups": 8, "top_groups": 2}})
    assert experts.router.choose(torch.zeros(5, 64)).tolist() == [[0, 1, 2]] * 5
    scores = torch.zeros(1, 64)
    scores[0, 40] = 1.0
    assert experts.router.choose(scores).tolist() == [[0, 1, 40]]


def test_losses_are_sums_of_the_formulas_over_counted_pairs():
    moe = {"experts": 5, "top_k": 2, "expert_width": 20, "balance": 0.3, "sequence_balance": 0.7, "z_loss": 0.11}
    experts = experts_of({"mlp": "swiglu", "moe": moe})
    experts.router.shares.copy_(torch.tensor([0.4, 0.1, 0.2, 0.3, 0.0]))
    x = torch.randn(3, 8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    counted = torch.rand(3, 8, generator=torch.Generator().manual_seed(6)) < 0.6
    counted[1] = False
    _, sums = experts(x, None, counted)
    wanted, entropy, z, shares = 0.0, 0.0, 0.0, experts.router.shares.tolist()
    for row, mask in zip(x, counted, strict=True):
        picked = row[mask]
        if not len(picked):
            continue
        logits, chosen = picked @ experts.router.weight.T, slow(experts, picked)[1]
        p = torch.exp(logits) / torch.exp(logits).sum(dim=1, keepdim=True)
        wanted += 0.3 * 5 * sum(shares[e] * p[t, e].item() for t in range(len(p)) for e in range(5))
        z += torch.log(torch.exp(logits).sum(dim=1)).square().sum().item()
        own = [sum(c.count(e) for c in chosen) / (2 * len(p)) for e in range(5)]
        wanted += 0.7 * 5 * len(p) * sum(own[e] * p[:, e].mean().item() for e in range(5))
        entropy -= (p * p.log()).sum().item()
    wanted += 0.11 * z
    assert [sums.loss.item(), sums.entropy.item(), sums.z.item()] == pytest.approx([wanted, entropy, z], rel=1e-12)
    parts = [experts(x[i : i + 1], None, counted[i : i + 1])[1] for i in range(3)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(wanted, rel=1e-12)
    assert torch.equal(sum(part.counts for part in parts), sums.counts)


def model(seed: int = 0, **moe) -> tuple[GPT, torch.Tensor, torch.Tensor]:
    """A model with a dense block and two with experts in float64, ids, and targets of which some are ignored."""
    settings = {"experts": 4, "top_k": 2, "expert_width": 20, "first_dense": 1, "balance": 0.1, "z_loss": 0.01, **moe}
    torch.manual_seed(seed)
    made = GPT(GPTConfig(**SIZE, mlp="swiglu", dropout=0.2, moe=settings)).double()
    ids, targets = torch.randint(29, (2, 4, 12), generator=torch.Generator().manual_seed(7))
    targets[0, :5] = -100
    return made, ids, targets


def test_narrow_weights_keep_the_bias_in_fp32():
    made, ids, targets = model()
    made = made.float()
    made.routers[0].choice_bias.fill_(0.001)
    made = made.bfloat16()
    assert made.routers[0].choice_bias.dtype == torch.float32 and (made.routers[0].choice_bias == torch.tensor(0.001)).all()
    assert made.routers[0].weight.dtype == torch.bfloat16
    assert made(ids, targets, seed=torch.tensor(5)).loss.isfinite()


def test_flops_and_idle_parameters_by_hand():
    """2 of 4 experts of 3 · 24 · 20, one of 2 blocks dense, none shared."""
    made, *_ = model()
    attention, dense, expert, router, head = 4 * 24 * 24, 3 * 24 * 96, 3 * 24 * 20, 4 * 24, 64 * 24
    assert made.config.flops_per_token(0) == 6 * (3 * attention + dense + 2 * (2 * expert + router) + head)
    assert made.config.idle_parameters == 2 * 2 * expert
    pattern = replace(made.config, layers={"experts": [False, True, True]})
    assert [layer.experts for layer in GPT(pattern).layers] == [False, True, True] == [each.experts for each in made.layers]
    assert math.prod(GPT(pattern).blocks[1].mlp.up.weight.shape) == 4 * 20 * 24


BAD = {
    "top_k": ({"top_k": 9}, ["top_k is 9", "at most 8"]),
    "groups": ({"groups": 3}, ["groups=3", "experts=8", "nearest", "2"]),
    "top_groups": ({"groups": 4, "top_groups": 5}, ["top_groups is 5", "at most 4"]),
    "too few groups": ({"groups": 4, "top_groups": 1, "top_k": 3}, ["top_k is 3", "have 2 experts", "2 groups"]),
    "shared": ({"shared_width": 8}, ["shared_width is 8", "no shared experts"]),
    "no block": ({"first_dense": 3}, ["no block", "first_dense is 3"]),
    "range": ({"experts": 1}, ["experts is 1", "at least 2"]),
    "fraction": ({"z_loss": -1.0}, ["z_loss is -1", "at least 0"]),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_settings_are_refused_with_the_nearest_that_works(name):
    settings, words = BAD[name]
    [problem] = GPTConfig(**SIZE, moe=settings).problems()
    assert all(word in problem for word in words), problem
    assert "--model.moe." in problem


def test_what_experts_cannot_be_combined_with_is_refused():
    [problem] = GPTConfig(**SIZE, base_width=12, moe={}).problems()
    assert "base_width" in problem and "experts" in problem
    [problem] = GPTConfig(**SIZE, layers={"experts": [True, False]}).problems()
    assert "model.layers.experts" in problem and "--model.moe.experts" in problem

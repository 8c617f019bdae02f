"""Rates and initial weights that follow from width and depth: the published tables, and the multipliers that they stand for."""

import math
from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW

from lit_llm.core.errors import UserError
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.optim import Lion, MuonAdamW, optimizer_of, parameter_groups
from lit_llm.plan.planned_recipe import build_to_plan

SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 37}
BASE = {"base_width": 8, "base_depth": 1}  # ratios 4 and 2


def options(make, **settings):
    """{group: (rate, weight decay, epsilon)} of an optimizer with rate 1 and decay 0.1."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**SIZE, **BASE, **settings}))
    groups = optimizer_of(model, make).param_groups
    return {group["name"]: (group["lr"], group["weight_decay"], group.get("eps")) for group in groups}


def close(**expected):
    return {name: pytest.approx(values) for name, values in expected.items()}


def test_adamws_rates_are_those_of_mup_and_completep():
    # CompleteP, table 1, with m_N = 4 and m_L = 2. Its factors of branches and logits are here in the last matrix of each.
    adamw = options(partial(AdamW, lr=1.0, weight_decay=0.1, eps=1e-8))
    assert adamw == close(
        matrix=(1 / 4, 0.4, 1e-8 / 8),
        projection=(1 / 8, 0.8, 1e-8 / 4),
        embedding=(1.0, 0.1, 1e-8 / 4),
        head=(1 / 4, 0.4, 1e-8),
        vector=(1.0, 0.0, 1e-8),
    )
    lion = options(partial(Lion, lr=1.0, weight_decay=0.1))
    assert {name: values[:2] for name, values in lion.items()} == {name: adamw[name][:2] for name in adamw}


def test_muons_rates_do_not_depend_on_the_width():
    make = partial(MuonAdamW, lr=1.0, adamw_lr=0.5, weight_decay=0.1)
    others = {"embedding": (0.5, 0.1, 1e-8 / 4), "head": (1 / 8, 0.4, 1e-8), "vector": (0.5, 0.0, 1e-8)}
    assert options(make) == close(matrix=(1.0, 0.1, None), projection=(0.5, 0.2, None), **others)
    rms = partial(make, adjust_lr="match_rms_adamw")  # its updates are √width times as large
    assert options(rms) == close(matrix=(1 / 2, 0.2, None), projection=(1 / 4, 0.4, None), **others)


def test_every_parameter_is_in_the_group_of_its_role_and_none_is_split_without_the_setting():
    model = GPT(GPTConfig(**SIZE, **BASE))
    names = {p: name for name, p in model.named_parameters()}
    groups = {group["name"]: {names[p] for p in group["params"]} for group in parameter_groups(model)}
    assert groups["projection"] == {f"blocks.{i}.{part}.project.weight" for i in range(2) for part in ("attention", "mlp")}
    assert groups["head"] == {"head.weight"} and groups["embedding"] == {"embedding.weight"}
    reads = ("attention.query", "attention.key", "attention.value", "mlp.up")
    assert groups["matrix"] == {f"blocks.{i}.{part}.weight" for i in range(2) for part in reads}
    assert set.union(*groups.values()) == set(names.values())
    muon = MuonAdamW(parameter_groups(model)).param_groups
    assert {group["name"]: group["algorithm"] for group in muon if group["name"] in ("matrix", "projection", "head")} == {
        "matrix": "muon",
        "projection": "muon",
        "head": "adamw",
    }
    plain = GPT(GPTConfig(**SIZE))
    assert [group["name"] for group in parameter_groups(plain)] == ["matrix", "embedding", "vector"]
    rates = [group["lr"] for group in optimizer_of(plain, partial(MuonAdamW, lr=0.3, adamw_lr=0.2)).param_groups]
    assert rates == [0.3, 0.2, 0.2]


def test_initial_weights_shrink_with_the_root_of_the_width_and_the_heads_with_the_width():
    settings = {**SIZE, "n_embd": 256, "n_layer": 4, "vocab_size": 512, "zero_init_projections": False, "init_std": 0.02}
    torch.manual_seed(0)
    scaled, plain = GPT(GPTConfig(**settings, base_width=64, base_depth=2)), GPT(GPTConfig(**settings))
    expected = {
        "embedding.weight": 0.02,
        "head.weight": 0.02 / 4,
        "blocks.1.mlp.up.weight": 0.02 / 2,
        "blocks.1.mlp.project.weight": 0.02 / math.sqrt(2 * 2) / 2 / 2,  # the base's, over the roots and the ratio of depths
    }
    for name, std in expected.items():
        assert scaled.get_parameter(name).std().item() == pytest.approx(std, rel=0.02), name
    assert plain.head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert plain.blocks[1].mlp.project.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 4), rel=0.02)


def test_training_equals_that_with_completeps_multipliers_of_branches_and_logits():
    settings = {**SIZE, "zero_init_projections": False, "init_std": 0.3}
    torch.manual_seed(0)
    ours = GPT(GPTConfig(**settings, **BASE)).double()
    theirs = GPT(GPTConfig(**settings, residual_scale=1 / 2, logit_scale=1 / 4)).double()
    factors = {"project": 2.0, "head": 4.0}  # what the multipliers take away, the weights have
    weights = {
        name: p * next((factor for part, factor in factors.items() if part in name.split(".")), 1.0)
        for name, p in ours.state_dict().items()
    }
    theirs.load_state_dict(weights)
    lr, decay, eps = 0.01, 0.5, 1e-3  # an epsilon and a decay that matter
    hidden = {"lr": lr / 4, "weight_decay": decay * 4, "eps": eps / 8}
    outside = {"lr": lr, "weight_decay": decay}
    groups: list = [
        {"params": [p for n, p in theirs.named_parameters() if p.ndim == 2 and n.startswith("blocks")], **hidden},
        {"params": [theirs.embedding.weight, theirs.head.weight], **outside, "eps": eps / 4},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "lr": lr, "weight_decay": 0.0, "eps": eps},
    ]
    optimizers = [optimizer_of(ours, partial(AdamW, lr=lr, weight_decay=decay, eps=eps)), AdamW(groups)]
    ids = torch.randint(37, (5, 2, 17), generator=torch.Generator().manual_seed(1))
    losses: list[list[float]] = [[], []]
    for rows in ids:
        for model, optimizer, found in zip((ours, theirs), optimizers, losses, strict=True):
            sums = model(rows[:, :-1], rows[:, 1:])
            optimizer.zero_grad()
            (sums.loss / sums.count).backward()
            optimizer.step()
            found.append(float(sums.nll))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][0] != losses[0][-1]
    for name, p in theirs.named_parameters():
        factor = next((factor for part, factor in factors.items() if part in name.split(".")), 1.0)
        torch.testing.assert_close(ours.get_parameter(name) * factor, p, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"tie_embeddings": True}, "model.tie_embeddings"),
        ({"norm_position": "post"}, "model.norm_position"),
        ({"bias": True}, "model.mlp_bias"),
        ({"base_width": 0}, "model.base_width"),
    ],
)
def test_models_without_a_rule_are_refused(changed, named):
    (problem,) = GPTConfig(**{**SIZE, **BASE, **changed}).problems()
    assert f"--{named}" in problem


def test_an_optimizer_without_a_rule_is_refused_before_a_run():
    with pytest.raises(UserError, match=r"have rules for MuonAdamW, .*, but the optimizer is SGD"):
        options(partial(SGD, lr=0.1))
    recipe = ["--config", "quickstart", "--optimizer", "SGD", "--optimizer.lr", "0.1"]
    with pytest.raises(UserError, match=r"--model\.base_width null") as error:
        build_to_plan([*recipe, "--model.base_width", "128"])
    assert len(str(error.value).splitlines()) == 1


def test_the_heads_initial_weights_keep_the_first_loss_within_two_percent_below_the_base_too():
    # The logits' variance is width · std², and the first loss is ln V plus half of it.
    stds = {width: GPTConfig(**{**SIZE, "n_embd": width, "base_width": 256}).head_std for width in (32, 128, 256, 1024)}
    limit = {width: math.sqrt(0.04 * math.log(37) / width) for width in stds}
    assert stds == pytest.approx({32: limit[32], 128: limit[128], 256: 0.02, 1024: 0.005})
    assert all(width * std**2 / 2 <= 0.0201 * math.log(37) for width, std in stds.items())

"""The coordinate check finds the power that a rule has, and its line of `check` fails where the rule is missing."""

import math
from types import SimpleNamespace

import pytest
import torch

from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.optim import Lion, MuonAdamW, transfer
from lit_llm.training import coordinate_check
from lit_llm.training.checklist import coordinates
from lit_llm.training.coordinate_check import LARGEST_POWER, width_powers

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1),
    "Muon": MuonAdamW,
    "Muon, match_rms_adamw": lambda groups: MuonAdamW(groups, lr=2e-3, adamw_lr=2e-3, adjust_lr="match_rms_adamw"),
    "Lion": lambda groups: Lion(groups, lr=3e-4),
}
KINDS = {
    "defaults": {},
    "convolutions": {"input_convolution": 4, "qkv_convolution": 4, "exclusive_attention": True},
    "gpt2": {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "qk_norm": False},
    "llama": {"mlp": "swiglu", "qk_norm": False},
}


SLOW = [("AdamW", kind) for kind in ("convolutions", "gpt2", "llama")]
SLOW += [("Muon", "convolutions"), ("Muon", "gpt2"), ("Muon, match_rms_adamw", "llama"), ("Lion", "convolutions")]


def mark(name: str, kind: str) -> tuple | pytest.MarkDecorator:
    if (name, kind) == ("AdamW", "defaults"):
        return ()
    return pytest.mark.slow if (name, kind) in SLOW else pytest.mark.soak


@pytest.mark.parametrize(("name", "kind"), [pytest.param(n, k, marks=mark(n, k)) for n in OPTIMIZERS for k in KINDS])
def test_powers_are_small_with_base_width_and_large_without(name, kind):
    config = {"n_layer": 6, "n_head": 8, "n_embd": 512, "vocab_size": 1000, **KINDS[kind]}
    powers = width_powers(GPTConfig(**config, base_width=64), OPTIMIZERS[name])
    assert set(powers) == {"queries", "hidden units", "residual stream", "logits"}
    assert max(map(abs, powers.values())) <= LARGEST_POWER, powers
    powers = width_powers(GPTConfig(**config), OPTIMIZERS[name])
    assert max(map(abs, powers.values())) > LARGEST_POWER, powers


def test_the_slope_is_the_power_of_a_power_law(monkeypatch):
    monkeypatch.setattr(coordinate_check, "_changes", lambda config, *_: {"x": 3.0 * config.n_embd**-0.75, "y": 0.5})
    powers = width_powers(GPTConfig(vocab_size=9), MuonAdamW)
    assert math.isclose(powers["x"], -0.75) and math.isclose(powers["y"], 0, abs_tol=1e-12)


def test_a_rule_that_does_nothing_is_noticed(monkeypatch):
    monkeypatch.setattr(coordinate_check, "SEEDS", 1)
    monkeypatch.setattr(transfer, "scale_rates", lambda *_: None)
    powers = width_powers(GPTConfig(vocab_size=9, base_width=64), OPTIMIZERS["AdamW"])
    assert max(map(abs, powers.values())) > LARGEST_POWER, powers


def test_a_model_with_experts_has_no_rule_to_check():
    moe = {"experts": 4, "top_k": 2, "first_dense": 3}  # of the check's two blocks, none would have experts
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=4, n_embd=16, n_head=2, vocab_size=9, block_size=8, mlp="swiglu", bias=False, moe=moe))
    module = SimpleNamespace(whole_model=model, lora=None, optimizer_factory=MuonAdamW)
    found = coordinates(SimpleNamespace(model=module))
    assert found.passed and found.found.startswith("not tested")


def test_the_generator_of_the_run_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(coordinate_check, "WIDTHS", (32, 64))
    before = torch.get_rng_state()
    width_powers(GPTConfig(vocab_size=9), MuonAdamW)
    assert torch.equal(before, torch.get_rng_state())

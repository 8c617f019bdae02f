"""Activation checkpointing, compilation and float8 on one device, and refused layouts."""

import math
from functools import partial

import pytest
import torch

from lit_llm.distributed.block_kernels import convert_to_float8
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallelize import parallelize
from lit_llm.models.gpt import GPT, GPTConfig

SIZE = {"n_layer": 6, "n_head": 4, "n_embd": 64, "block_size": 128, "vocab_size": 64}
IDS = torch.randint(0, 64, (4, 128), generator=torch.Generator().manual_seed(0))


def build(mode="none", *, compile=False, **settings) -> GPT:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**SIZE, **settings}))
    parallelize(model, ComputeConfig(activation_checkpointing=mode, compile=compile), torch.device("cpu"))
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def gradients(model: GPT, seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    model(IDS, IDS.roll(-1, dims=1)).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["full", 2, "attention", "cheap"])
def test_recomputing_keeps_gradients_bit_for_bit_and_parameter_names(mode, dropout):
    plain, recomputing = build(dropout=dropout), build(mode, dropout=dropout)
    assert recomputing.state_dict().keys() == plain.state_dict().keys()
    ours, reference = gradients(recomputing), gradients(plain)
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


def test_without_a_compiler_compile_is_off_and_says_why(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(match=r"compute.compile is off: no C\+\+ compiler was found \(no-such-compiler\)"):
        model = build(compile=True)
    assert torch.equal(model(IDS), build()(IDS))


def test_tables_of_positions_stay_in_fp32():
    """bf16 cannot represent 2,049: rounded tables would give it the angle of 2,048."""
    model = build(block_size=4096).to(torch.bfloat16)
    assert model.rotary[0].cos.dtype == torch.float32 and model.blocks[0].attention.query.weight.dtype == torch.bfloat16
    half = 8
    for i in (0, 3):
        angle = 2049 * 10000 ** (-i / half)
        assert float(model.rotary[0].cos[0, 2049, i]) == pytest.approx(math.cos(angle), abs=2e-4)
        assert float(model.rotary[0].sin[0, 2049, i]) == pytest.approx(math.sin(angle), abs=2e-4)


def test_float8_is_refused_on_a_device_without_it():
    with torch.device("meta"):
        model = GPT(GPTConfig(**SIZE))
    with pytest.raises(ValueError, match=r"compute capability 8.9 or more, but this device is cpu \(--compute.float8 false\)"):
        parallelize(model, ComputeConfig(float8=True), torch.device("cpu"))


def test_float8_replaces_only_the_linear_layers_of_the_blocks(monkeypatch):
    """Uses torchao's emulation for CPUs: the same casts and scales, multiplied in a wider type."""
    from torchao import float8
    from torchao.float8.float8_linear import Float8Linear

    convert = float8.convert_to_float8_training
    emulated = partial(convert, config=float8.Float8LinearConfig(emulate=True))
    monkeypatch.setattr(float8, "convert_to_float8_training", emulated)
    config = GPTConfig(**SIZE, mlp_width=72, zero_init_projections=False)  # 72 is not a multiple of 16
    with torch.device("meta"):
        model = GPT(config)
    names = list(model.state_dict())
    convert_to_float8(model)
    swapped = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert swapped == {"query", "key", "value", "project"} and type(model.head) is torch.nn.Linear
    assert all(type(block.mlp.up) is torch.nn.Linear for block in model.blocks)
    assert list(model.state_dict()) == names
    model.to_empty(device="cpu")
    model.init_weights()
    plain = GPT(config)
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, config.vocab_size, (2, config.block_size), generator=torch.Generator().manual_seed(0))
    gradients = []
    for each in (model, plain):
        loss = each(ids, ids).loss
        loss.backward()
        gradients.append((loss.item(), each.blocks[0].attention.query.weight.grad))
    (ours, theirs), (gradient, exact) = zip(*gradients, strict=True)
    assert ours == pytest.approx(theirs, rel=1e-3) and ours != theirs
    # e5m2 has two mantissa bits: a relative error of at most 1/8, and less in sums.
    assert 0 < (gradient - exact).norm() < exact.norm() / 8

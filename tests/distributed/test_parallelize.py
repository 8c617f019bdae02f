"""Activation checkpointing, compilation and float8 on one device, and refused layouts."""

import math
from functools import partial

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from lit_llm.distributed.block_kernels import convert_to_float8, no_compiler
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallelize import parallelize
from lit_llm.distributed.tensor_parallel import tensor_parallel_problem
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


@pytest.fixture(scope="module")
def peak():
    """Peak bytes of a forward and backward pass beyond weights and gradients, by mode."""

    def measured(mode):
        model = build(mode)
        gradients(model)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            model(IDS, IDS).loss.backward()
        fixed = sum(p.numel() * p.element_size() + p.grad.numel() * p.grad.element_size() for p in model.parameters())
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - fixed

    return {mode: measured(mode) for mode in ("none", "cheap", "attention", 3, 2, "full")}


@pytest.mark.slow
def test_each_mode_keeps_less(peak):
    block_input = IDS.numel() * 64 * 4  # (B, T, d) in fp32
    assert peak["full"] < peak["attention"] < peak["none"] and peak["cheap"] < peak["none"]
    # Blocks that are not recomputed store everything, so the peak falls linearly with the recomputed ones.
    a_block = (peak["none"] - peak["full"]) / 5  # at the peak of "full" one block is whole
    assert peak[2] == pytest.approx(peak["none"] - 3 * a_block, rel=0.1)
    assert peak[3] == pytest.approx(peak["none"] - 2 * a_block, rel=0.1)
    # Full recomputation still stores each block's input.
    deeper = build("full", n_layer=12)
    gradients(deeper)
    tracker = MemTracker()
    tracker.track_external(deeper)
    with tracker:
        deeper(IDS, IDS).loss.backward()
    fixed = sum(2 * p.numel() * p.element_size() for p in deeper.parameters())
    grown = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - fixed - peak["full"]
    assert grown == pytest.approx(6 * block_input, rel=0.05)


def test_recomputing_is_off_without_gradients():
    model = build("full")
    with torch.no_grad():
        ours = model(IDS)
    assert torch.equal(ours, build()(IDS).detach())


@pytest.mark.skipif(no_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_blocks_compute_the_same(dropout):
    plain, compiled = (
        build(*mode, n_layer=2, dropout=dropout, **on) for mode, on in (((), {}), (("full",), {"compile": True}))
    )
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    ours, reference = gradients(compiled), gradients(plain)
    for name in reference:
        torch.testing.assert_close(ours[name], reference[name], rtol=1e-4, atol=1e-5)


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


def test_preparing_a_model_leaves_the_global_matmul_precision_alone():
    before = torch.get_float32_matmul_precision()
    with torch.device("meta"):
        model = GPT(GPTConfig(**SIZE))
    parallelize(model, ComputeConfig(matmul_precision="high"), torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == before == "highest"


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


def test_a_model_that_tensor_parallelism_cannot_split_is_refused_in_one_sentence_with_a_number_that_fits():
    config = GPTConfig(
        n_layer=1, n_head=6, n_kv_head=3, n_embd=96, block_size=129, vocab_size=1000, mlp_width=99, pad_vocab_to=1
    )
    assert tensor_parallel_problem(config, 4) == (
        "tensor_parallel=4 does not divide model.n_head = 6, model.n_kv_head = 3, the MLP's hidden width = 99, "
        "model.block_size = 129: use 1 (--trainer.strategy.tensor_parallel 1), or change the model (--model.n_head, "
        "--model.n_kv_head, --model.mlp_width, --model.block_size)"
    ), "3 divides these sizes, but not the vocabulary"
    config.vocab_size = 1002
    problem = tensor_parallel_problem(config, 6)
    assert problem is not None and "n_head = 6" not in problem and ": use 3 (--trainer.strategy.tensor_parallel 3)" in problem
    assert "the padded vocabulary" not in problem and "the padded vocabulary = 1002" in str(tensor_parallel_problem(config, 4))
    assert tensor_parallel_problem(config, 3) is None

"""Planned parameters and FLOPs equal those of the built model."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_llm.distributed.tensor_parallel import apply_tensor_parallel, tensor_parallel_problem
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.optim import parameter_groups
from lit_llm.plan import parameters, table, total_parameters
from lit_llm.plan.weights import weights_of

CONFIGS = {
    "defaults": {},
    "gpt2": {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False},
    "grouped queries": {"n_kv_head": 2},
    "convolutions": {"qkv_convolution": 5, "n_kv_head": 2},
    "one key head, swiglu": {"n_kv_head": 1, "mlp": "swiglu", "mlp_width": 100},
    "padded": {"vocab_size": 1001, "pad_vocab_to": 128},
    "heads that do not divide the width": {"n_head": 3, "head_dim": 6, "bias": True},
    "biases of queries, keys and values": {"qkv_bias": True, "n_kv_head": 2, "mlp": "swiglu"},
}


def config(name: str) -> GPTConfig:
    return GPTConfig(**{"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 300, **CONFIGS[name]})


@pytest.mark.parametrize("name", CONFIGS)
def test_each_part_has_the_parameters_of_the_built_model(name):
    with torch.device("meta"):
        model = GPT(config(name))
    built: dict[str, int] = {}
    for key, p in model.named_parameters():
        if key.endswith("bias") and "norm" not in key:
            part = "biases"
        elif "norm" in key:
            part = "norms"
        elif "convolution" in key:
            part = "convolutions"
        elif ".attention." in key:
            part = "attention"
        elif ".mlp." in key:
            part = "mlp"
        else:
            part = {"embedding": "token embedding", "positions": "position embedding", "head": "output head"}[key.split(".")[0]]
        built[part] = built.get(part, 0) + p.numel()
    shape = config(name)
    assert parameters(shape) == built
    assert total_parameters(shape) == model.num_parameters()
    of_blocks = sum(weight.total for weight in weights_of(shape) if weight.block is not None)
    assert of_blocks == shape.n_layer * sum(p.numel() for p in model.blocks[0].parameters())
    groups = {group["name"]: sum(p.numel() for p in group["params"]) for group in parameter_groups(model)}
    counted = Counter()
    for weight in weights_of(shape):
        counted[weight.group] += weight.total
    assert counted == groups


@pytest.fixture
def two_ranks():
    """A mesh of two ranks without communication: enough to split the tensors of a model and count them."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", [name for name in CONFIGS if tensor_parallel_problem(config(name), 2) is None])
def test_a_tensor_parallel_rank_holds_the_parameters_of_the_split_model(name, two_ranks):
    with torch.device("meta"):
        model = GPT(config(name))
    apply_tensor_parallel(model, two_ranks)
    assert sum(w.total for w in weights_of(config(name), ranks=2)) == sum(p.to_local().numel() for p in model.parameters())


def test_the_planner_is_imported_without_torch_and_lightning():
    code = (
        "import sys, lit_llm.plan as p, lit_llm.reporting.plan_text, lit_llm.plan.sweep, lit_llm.plan.speed;"
        "print([n for n in ('torch', 'lightning', 'numpy') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_every_device_of_the_table_has_its_peaks():
    for entry in table().values():
        assert (entry.peak_tflops["bf16"] is not None) == entry.is_gpu, entry.name
    t4, h100 = table()["t4"], table()["h100-sxm"]
    assert (t4.peak_for("bf16-mixed"), t4.peak_for("16-mixed"), t4.peak_for("32-true")) == (None, 65.0, 8.1)
    v100 = table()["v100-32gb"]  # before Ampere: neither bf16 nor tf32, whatever torch is allowed to do
    found = [v100.peak_for(*each) for each in (("bf16-mixed",), ("16-mixed",), ("32-true",), ("32-true", "high"))]
    assert found == [None, 125.0, 15.7, 15.7]
    assert (h100.peak_for("32-true"), h100.peak_for("32-true", "high"), h100.peak_for("64-true")) == (67.0, 494.5, None)

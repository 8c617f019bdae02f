"""A run that starts from other weights (`init_from`) on two processes: every layout has the checkpoint's values."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from launch import run_ranks

from lit_llm.checkpoint import disk_format
from lit_llm.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("initial_weights_script.py")
LAYOUTS = {"fsdp2": {"shard": 2}, "tensor parallel": {"tensor_parallel": 2}, "ddp": "ddp"}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(the weights of start.ckpt, what each rank reports)"""
    folder = tmp_path_factory.mktemp("start")
    (folder / "text.txt").write_text("".join(f"line {i}, {i * i}\n" for i in range(300)))
    torch.manual_seed(0)
    config = GPTConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=12, block_size=32, vocab_size=257, mlp="swiglu")
    model = GPT(config).bfloat16()  # like imported weights; the run uses fp32
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    disk_format.write({"state_dict": weights, "model_config": asdict(config), "global_step": 0}, folder / "start.ckpt")
    reports = run_ranks(SCRIPT, 2, folder, json.dumps(LAYOUTS))
    return {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}, reports


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_checkpoint_in_bf16_fills_every_layout(layout, start):
    expected, reports = start
    total = sum(tensor.numel() for tensor in expected.values())
    for report in reports:
        got = report["results"][layout]
        assert got["whole"].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(got["whole"][name], tensor), name
        assert got["local"] == total if layout == "ddp" else 0.45 < got["local"] / total < 0.55  # norms are not split


def test_a_checkpoint_in_shards_fills_every_mesh(start):
    for report in start[1]:
        for layout, got in report["again"].items():
            for name, tensor in report["trained"].items():
                assert torch.equal(got["whole"][name], tensor), (layout, name)

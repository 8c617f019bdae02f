"""A run that starts from other weights (`init_from`) on two processes: every layout has the checkpoint's values."""

from dataclasses import asdict

import layouts
import pytest
import torch
from test_strategies import make, run

from lit_llm.checkpoint import disk_format
from lit_llm.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.slow

LAYOUTS = {"fsdp2": {"shard": 2}, "tensor parallel": {"tensor_parallel": 2}, "ddp": "ddp"}
SETTINGS = {"n_kv_head": 2, "head_dim": 12, "mlp": "swiglu"}
START = {"steps": 0, "parameters": True, "validate": False, "settings": SETTINGS}


def test_a_checkpoint_whole_or_in_shards_fills_every_layout(tmp_path):
    make(tmp_path)
    torch.manual_seed(0)
    config = GPTConfig(**layouts.SIZE, **SETTINGS, vocab_size=257)
    model = GPT(config).bfloat16()  # like imported weights; the run uses fp32
    weights = model.state_dict()
    saved = {f"model.{name}": tensor for name, tensor in weights.items()}
    disk_format.write({"state_dict": saved, "model_config": asdict(config), "global_step": 0}, tmp_path / "start.ckpt")
    jobs = {"train": {**START, "steps": 1, "strategy": {"shard": 2}, "to": "saved", "sharded": True}}
    for name, strategy in LAYOUTS.items():
        jobs[f"{name}, whole"] = {**START, "strategy": strategy, "init_from": "start.ckpt"}
        jobs[f"{name}, shards"] = {**START, "strategy": strategy, "init_from": "saved/step-00000001.ckpt"}
    found, total = run(tmp_path, 2, jobs), sum(tensor.numel() for tensor in weights.values())
    assert len(list((tmp_path / "saved/step-00000001.ckpt").glob("shard-*.pt"))) == 2
    for name in LAYOUTS:
        for source, expected in (("whole", weights), ("shards", found["train"]["parameters"])):
            got = found[f"{name}, {source}"]
            own = {parameter.removeprefix("model."): tensor for parameter, tensor in got["parameters"].items()}
            assert own.keys() == {parameter.removeprefix("model.") for parameter in expected}
            for parameter, tensor in expected.items():
                assert torch.equal(own[parameter.removeprefix("model.")], tensor.float()), (name, source, parameter)
            held = got["bytes"] / (4 * total)
            assert held == 1 if name == "ddp" else 0.45 < held < 0.55, name  # norms are not split

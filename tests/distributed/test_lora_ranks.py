"""LoRA on two gloo processes, compared with one: DDP, FSDP2, tensor parallelism, and their checkpoints."""

import json
from pathlib import Path

import layouts
import pytest
import torch
from launch import run_ranks

from lit_llm.checkpoint.disk_format import read

SCRIPT = Path(layouts.__file__)
KINDS = {
    "modern": {"model": "modern", "settings": {"mlp": "swiglu"}, "lora": {"rank": 3, "alpha": 12.0}},
    "experts": {
        "model": "experts",
        "settings": {
            "moe": {"experts": 4, "top_k": 2, "expert_width": 24, "shared_experts": 1, "first_dense": 1, "z_loss": 0.01}
        },
        "lora": {"rank": 3, "targets": ["query", "router", "up", "experts.up", "experts.gate", "experts.project"]},
    },
    # Two shards hold rows of three experts. The state of B with rank 1 has the shape of NorMuon's numbers of rows.
    "rows": {
        "model": "experts",
        "settings": {"moe": {"experts": 3, "top_k": 2, "expert_width": 24}},
        "lora": {"rank": 1, "targets": ["experts.up", "experts.project"]},
    },
    "gpt2": {"model": "gpt2", "lora": {"rank": 4, "targets": ["query", "project"]}},  # biases, a tied head
}
LAYOUTS = {"ddp": "ddp", "fsdp2": {"shard": 2}, "tp": {"shard": 1, "tensor_parallel": 2}}
ON = {"modern": LAYOUTS, "gpt2": ("fsdp2", "tp"), "experts": ("ddp", "fsdp2"), "rows": ("fsdp2",)}
"""Experts under tensor parallelism are tested beside expert parallelism."""


def recipe(kind: str, **more) -> dict:
    return {**KINDS[kind], "init_from": f"{kind}/step-00000002.ckpt", "parameters": True, "steps": 4, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and a folder of base weights for each kind."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "text.txt").write_text(layouts.TEXT)
    for kind, settings in KINDS.items():
        base = {key: value for key, value in settings.items() if key != "lora"}
        layouts.train(folder, steps=2, to=kind, validate=False, **base)
    return folder


@pytest.mark.slow
def test_two_processes_train_as_one_and_their_checkpoints_cross(folder):
    alone = {kind: layouts.train(folder, **recipe(kind)) for kind in KINDS}
    narrow = layouts.train(folder, **recipe("modern", precision="bf16-true"))
    jobs = {f"{kind} / {name}": recipe(kind, strategy=LAYOUTS[name]) for kind in KINDS for name in ON[kind]}
    jobs["experts / ep"] = recipe("experts", strategy={"shard": 2, "expert": 2})
    jobs["experts / ep × tp"] = recipe("experts", strategy={"shard": 1, "tensor_parallel": 2, "expert": 2})
    jobs["rows / fsdp2"] |= {"save_at": 2, "to": "rows-saved", "sharded": True}
    jobs["modern / fsdp2"] |= {"save_at": 2, "to": "sharded", "sharded": True}
    jobs["modern / tp"] |= {"save_at": 2, "to": "whole"}
    for name in ("gpt2 / fsdp2", "gpt2 / tp"):
        jobs[name]["compute"] = {"activation_checkpointing": "full"}
    jobs |= {
        "narrow / fsdp2": recipe("modern", strategy=LAYOUTS["fsdp2"], precision="bf16-true"),
        "narrow / tp": recipe("modern", strategy=LAYOUTS["tp"], precision="bf16-true"),
    }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    reports = run_ranks(SCRIPT, 2, folder, folder / "jobs.json", timeout=400)
    for name in jobs:
        expected = narrow if "narrow" in name else alone[name.partition(" / ")[0]]
        # bf16 rounds to 2^-8, and ranks round other parts of the sums.
        tolerance = 5e-3 if "narrow" in name else 2e-5
        for report in reports:
            for key in ("train/loss", "grad/norm"):
                looser = 10 if key == "grad/norm" else 1
                assert report[name][key] == pytest.approx(expected[key], rel=looser * tolerance), (name, key)
            assert report[name]["val/loss"] == pytest.approx(expected["val/loss"], rel=tolerance), name
            for parameter, value in report[name]["parameters"].items():
                assert value.dtype == expected["parameters"][parameter].dtype, (name, parameter)
                if "lora" not in parameter:
                    assert torch.equal(value, expected["parameters"][parameter]), (name, parameter)
                elif "narrow" not in name:
                    assert torch.allclose(value, expected["parameters"][parameter], atol=2e-4), (name, parameter)
    # The state of the optimizer is that of adapters, and is split over the ranks.
    for kind in KINDS:
        held = sum(report[f"{kind} / fsdp2"]["state bytes"] for report in reports)
        assert held == pytest.approx(alone[kind]["state bytes"], rel=0.05), kind
    for place in ("sharded", "whole"):
        saved = read(folder / place / "step-00000002.ckpt")
        assert all("lora" in name for name in saved["state_dict"]) and saved["lora"]["rank"] == 3
        continued = layouts.train(folder, resume=f"{place}/step-00000002.ckpt", **recipe("modern"))
        assert continued["steps"] == [3, 4]
        assert continued["train/loss"] == pytest.approx(alone["modern"]["train/loss"][2:], rel=2e-5)
    # The merged weights of a LoRA run, of which each rank computes its part, start another.
    more = {
        "modern / onward": recipe("modern", strategy=LAYOUTS["fsdp2"]) | {"init_from": "sharded/step-00000004.ckpt"},
        "rows / on": recipe("rows", strategy=LAYOUTS["fsdp2"], resume="rows-saved/step-00000002.ckpt"),
    }
    (folder / "jobs.json").write_text(json.dumps(more))
    found = run_ranks(SCRIPT, 2, folder, folder / "jobs.json")[0]
    assert found["rows / on"]["train/loss"] == reports[0]["rows / fsdp2"]["train/loss"][2:]
    onward = found["modern / onward"]
    expected = layouts.train(folder, **(recipe("modern") | {"init_from": "sharded/step-00000004.ckpt"}))
    assert onward["train/loss"] == pytest.approx(expected["train/loss"], rel=2e-5)


@pytest.mark.slow
def test_compiled_blocks_with_adapters_compute_the_same(folder):
    plain, compiled = (layouts.train(folder, **recipe("modern", steps=3, compute={"compile": c})) for c in (False, True))
    assert compiled["train/loss"] == pytest.approx(plain["train/loss"], rel=2e-6)


@pytest.mark.slow
def test_dropout_of_adapters_works_on_every_layout(folder):
    """Tensor-parallel ranks share their samples, and drop what one process drops."""
    jobs = {name: recipe("modern", strategy=layout, lora={"rank": 3, "dropout": 0.3}) for name, layout in LAYOUTS.items()}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    reports = run_ranks(SCRIPT, 2, folder, folder / "jobs.json")
    without = layouts.train(folder, **recipe("modern", lora={"rank": 3}))
    alone = layouts.train(folder, **recipe("modern", lora={"rank": 3, "dropout": 0.3}))
    assert reports[0]["tp"]["train/loss"] == pytest.approx(alone["train/loss"], rel=2e-5)
    for name in jobs:
        assert reports[0][name]["train/loss"] == reports[1][name]["train/loss"], name
        assert reports[0][name]["train/loss"][0] == pytest.approx(without["train/loss"][0], rel=2e-6), "B is zero"
        assert reports[0][name]["train/loss"][3] != pytest.approx(without["train/loss"][3], rel=1e-5)
        assert all(torch.equal(reports[1][name]["parameters"][p], v) for p, v in reports[0][name]["parameters"].items())

"""A custom architecture on two gloo processes, compared with one."""

import json
import sys
from pathlib import Path

import layouts
import pytest
import torch
from launch import run_ranks

MODELS = Path(__file__).parents[1] / "models"
SCRIPT = Path(layouts.__file__)
KINDS = {
    "blocks": {
        "architecture": {"class_path": "custom_models.LSTMModel", "init_args": {"n_layer": 2}},
        "optimizer": "MuonAdamW",
    },
    "no blocks": {"architecture": {"class_path": "custom_models.ConvModel", "init_args": {}}, "loss": {"z_loss": 1e-3}},
}
SHARDS = {"shard": 2}


@pytest.mark.slow
def test_two_processes_train_as_one_and_their_checkpoints_cross(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(MODELS))
    monkeypatch.setenv("PYTHONPATH", str(MODELS))
    (tmp_path / "text.txt").write_text(layouts.TEXT)
    alone = {name: layouts.train(tmp_path, parameters=True, **kind) for name, kind in KINDS.items()}
    recomputed = {**KINDS["blocks"], "compute": {"activation_checkpointing": "full"}}
    jobs = {
        "blocks / ddp": {**KINDS["blocks"], "strategy": "ddp"},
        "blocks / fsdp2": {**KINDS["blocks"], "strategy": SHARDS, "save_at": 4, "to": "sharded", "sharded": True},
        "blocks / recomputed": {**recomputed, "strategy": SHARDS},
        "blocks / ignored targets": {**KINDS["blocks"], "strategy": SHARDS, "ignoring": True},
        "no blocks / ddp": {**KINDS["no blocks"], "strategy": "ddp"},
        "no blocks / fsdp2": {**KINDS["no blocks"], "strategy": SHARDS},
    }
    (tmp_path / "jobs.json").write_text(json.dumps({name: {**job, "parameters": True} for name, job in jobs.items()}))
    reports = run_ranks(SCRIPT, 2, tmp_path, tmp_path / "jobs.json")
    alone["ignored"] = layouts.train(tmp_path, parameters=True, ignoring=True, **KINDS["blocks"])
    for name in jobs:
        expected = alone["ignored" if "ignored" in name else name.partition(" / ")[0]]
        for report in reports:
            for key in ("train/loss", "grad/norm"):
                assert report[name][key] == pytest.approx(expected[key], rel=2e-5), (name, key)
            assert report[name]["val/loss"] == pytest.approx(expected["val/loss"], rel=2e-5), name
            for parameter, value in report[name]["parameters"].items():
                assert torch.allclose(value, expected["parameters"][parameter], atol=2e-5), (name, parameter)
    # Under FSDP2 a rank holds half of the weights and of the optimizer's state.
    for kind in KINDS:
        for key in ("bytes", "state bytes"):
            held = sum(report[f"{kind} / fsdp2"][key] for report in reports)
            assert held == pytest.approx(alone[kind][key], rel=0.01), (kind, key)
    # Written in shards by two processes, continued by one.
    continued = layouts.train(tmp_path, resume="sharded/step-00000004.ckpt", **KINDS["blocks"])
    assert continued["steps"] == [5, 6, 7, 8]
    assert continued["train/loss"] == pytest.approx(alone["blocks"]["train/loss"][4:], rel=2e-5)
    sys.modules.pop("custom_models", None)

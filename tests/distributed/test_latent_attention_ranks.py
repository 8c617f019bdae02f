"""Latent attention on ranks trains what one process trains: heads over ranks, and positions over ranks in both ways."""

import json
from pathlib import Path

import layouts
import pytest
import torch
from launch import run_ranks

JOB = {"model": "deepseek", "steps": 4, "ignoring": True, "balance": 0.02, "parameters": True, "optimizer": "AdamW-fused"}
EXACT = {"precision": "64-true"}
MUON = {"optimizer": "MuonAdamW"}  # its iteration is in fp32
DROPS = {**EXACT, "steps": 2, "settings": {"dropout": 0.2}}
TWO = {
    "tp, cheap": {"strategy": {"tensor_parallel": 2}, "compute": {"activation_checkpointing": "cheap"}, **DROPS},
    "cp, full": {"strategy": {"context": 2}, "compute": {"activation_checkpointing": "full"}, **DROPS},
    "cp, attention": {
        **{"strategy": {"context": 2}, "compute": {"activation_checkpointing": "attention"}, "packed": True, "steps": 2},
        **{"precision": "64-true", "settings": {"window": 9}},
    },
    "cp, heads": {"strategy": {"context": 2, "context_attention": "heads"}, **DROPS},
    "tp, Muon": {"strategy": {"tensor_parallel": 2}, **MUON, "steps": 2},
}
ADAPTED = {**EXACT, "balance": None, "lora": {"rank": 2, "dropout": 0.2}, "init_from": "base.ckpt"}
LORA = {
    "lora, tp": {"strategy": {"tensor_parallel": 2}, **ADAPTED},
    "lora, cp": {"strategy": {"context": 2}, **ADAPTED},
}
FOUR = {
    "ep × tp × pp": {"strategy": {"pipeline": 2, "tensor_parallel": 2, "expert": 2}, **EXACT},
    "fsdp2 × cp, Muon": {"strategy": {"shard": 2, "context": 2}, **MUON},
}
LONG = {
    **{name: {**job, "steps": 20} for name, job in FOUR.items()},
    "ep × tp × pp, Muon": {**FOUR["ep × tp × pp"], "precision": "32-true", **MUON, "steps": 20},
    "fsdp2 × cp": {"strategy": {"shard": 2, "context": 2}, **EXACT, "steps": 20},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    (folder / "text.txt").write_text(layouts.TEXT)
    lines = layouts.TEXT.splitlines()
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder


def check(folder: Path, ranks: int, jobs: dict[str, dict]) -> None:
    """Relative 5e-6 in fp32, and 1e-10 in float64."""
    jobs = {name: {**JOB, **job} for name, job in jobs.items()}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    reports = run_ranks(Path(layouts.__file__), ranks, folder, folder / "jobs.json", timeout=500)
    alone: dict[str, dict] = {}
    for name, job in jobs.items():
        settings = {key: value for key, value in job.items() if key not in ("strategy", "compute")}
        if (key := json.dumps(settings)) not in alone:
            alone[key] = layouts.train(folder, **settings)
        wanted = alone[key]
        rel = 1e-10 if job.get("precision") == "64-true" else 5e-6
        for report in reports:
            for figure in ("train/loss", "val/loss", "grad/norm"):
                assert report[name][figure] == pytest.approx(wanted[figure], rel=rel), (name, figure)
            for parameter, value in report[name]["parameters"].items():
                assert torch.allclose(value, wanted["parameters"][parameter], rtol=400 * rel, atol=100 * rel), (name, parameter)


@pytest.mark.slow
def test_two_ranks(folder):
    check(folder, 2, TWO)


@pytest.mark.slow
def test_adapters_on_two_ranks(folder):
    layouts.train(folder, **{**JOB, **EXACT, "steps": 1, "to": "base", "validate": False})
    (folder / "base.ckpt").symlink_to(folder / "base/step-00000001.ckpt")
    check(folder, 2, LORA)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [FOUR, pytest.param(LONG, marks=pytest.mark.soak)], ids=["pairs", "20 steps"])
def test_four_ranks(folder, jobs):
    check(folder, 4, jobs)

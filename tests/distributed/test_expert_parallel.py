"""Ranks that share the experts of a layer train what one process trains, beside every other dimension of a mesh."""

import json
from pathlib import Path

import layouts
import pytest
import torch
from launch import run_ranks

MOE = {
    **{"experts": 8, "top_k": 2, "expert_width": 24, "shared_experts": 1, "router": "sigmoid"},
    **{"balance": 0.1, "sequence_balance": 0.05, "z_loss": 0.01},
}
JOB = {
    "model": "experts",
    "steps": 2,
    "ignoring": True,
    "balance": 0.02,
    "parameters": True,
    "settings": {"moe": MOE, "n_layer": 2},
}
"""Targets are ignored, so ranks and micro-batches have different numbers of them."""
FULL = {"compute": {"activation_checkpointing": "full"}}
EP = {"strategy": {"shard": 2, "expert": 2}, "optimizer": "MuonAdamW"}
TWO = {
    "full recomputation": {**EP, **FULL},
    # One rank gets all tokens, and the other none.
    "an expert without a token, and one with all": {**EP, "tilted": True, "settings": {"moe": {**MOE, "top_k": 1}}},
}
MORE = {
    "tensor parallelism alone": {**EP, "strategy": {"shard": 1, "tensor_parallel": 2}},
    "replicas": {**EP, "strategy": "ddp"},
    "rows of five experts": {**EP, "strategy": {"shard": 2}, **FULL, "settings": {}},
    "cheap recomputation": {**EP, "compute": {"activation_checkpointing": "cheap"}},
    "bf16": {**EP, **FULL, "precision": "bf16-mixed"},
}
MUON = {"optimizer": "MuonAdamW"}  # its iteration is in fp32
EXACT = {"optimizer": "AdamW-fused", "precision": "64-true"}
STAGES = {"settings": {"moe": MOE, "n_layer": 4}}  # two for each rank
FOUR = {
    "ep × hsdp": {"strategy": {"replicate": 2, "shard": 2, "expert": 2}, **MUON},
    "ep × tp": {"strategy": {"shard": 2, "tensor_parallel": 2, "expert": 4}, **MUON},
    "ep × cp": {"strategy": {"context": 2, "shard": 2, "expert": 2}, **EXACT},
    "ep × pp, zbv": {"strategy": {"pipeline": 2, "shard": 2, "expert": 2, "schedule": "zbv"}, **EXACT, **STAGES},
    "tp × pp, every target counts": {
        **{"strategy": {"pipeline": 2, "tensor_parallel": 2, "expert": 2}, "ignoring": False},
        **EXACT,
    },
    # Ranks have rows of experts that they cannot share whole.
    "six experts, three over two ranks": {
        **{"strategy": {"shard": 4, "expert": 2}, "settings": {"moe": {**MOE, "experts": 6}}},
        "optimizer": "NorMuon",
    },
    "three experts of sizes that four ranks do not divide": {
        "strategy": {"shard": 4},
        "settings": {"moe": {**MOE, "experts": 3, "expert_width": 22}, "n_embd": 34, "n_head": 1, "n_kv_head": 1},
        "optimizer": "NorMuon",
    },
}
DEGREES = {"ep 1": {"shard": 4}, "ep 2": {"shard": 4, "expert": 2}, "ep 4": {"shard": 4, "expert": 4}}
ROWS = {"rows": {"shard": 4}, "ep, rows": {"shard": 4, "expert": 2}, "whole": {"replicate": 2, "shard": 2}}
"""Of two experts."""
EIGHT = {
    "ep × cp × tp": {"shard": 2, "context": 2, "tensor_parallel": 2, "expert": 4},
    "ep × tp × pp": {"shard": 2, "tensor_parallel": 2, "pipeline": 2, "expert": 2},
    "ep": {"shard": 8, "expert": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    (folder / "text.txt").write_text(layouts.TEXT)
    return folder


def compare(found: dict, wanted: dict, rel: float) -> None:
    """Counts are whole numbers, so equal: no token has chosen another expert. Of other stages, a rank knows no bias."""
    for name in ("train/loss", "val/loss", "grad/norm"):
        assert found[name] == pytest.approx(wanted[name], rel=rel), name
    assert found.get("load") == wanted.get("load")
    for name, values in wanted.get("means", {}).items():
        assert found["means"][name] == pytest.approx(values, rel=10 * rel), name
    for name in ("biases", "shares") if "biases" in wanted else ():
        pairs = [(a, b) for a, b in zip(found[name], wanted[name], strict=True) if a is not None]
        assert pairs and all(a == b for a, b in pairs), name
    for name, value in found["parameters"].items():
        assert torch.allclose(value, wanted["parameters"][name], rtol=200 * rel, atol=40 * rel), name


def check(folder: Path, ranks: int, jobs: dict[str, dict], common: dict = JOB) -> None:
    """Compare each job with the same on one process: relative 5e-6 in fp32 after a few steps, and 1e-10 in float64."""
    jobs = {name: {**common, **job} for name, job in jobs.items()}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    reports = run_ranks(Path(layouts.__file__), ranks, folder, folder / "jobs.json", timeout=400)
    alone: dict[str, dict] = {}
    for name, job in jobs.items():
        settings = {key: value for key, value in job.items() if key not in ("strategy", "compute")}
        key = json.dumps(settings)
        if key not in alone:
            alone[key] = layouts.train(folder, **settings)
        for report in reports:
            if job.get("precision") == "bf16-mixed":  # sums differ by their order, which moves some tokens
                assert report[name]["train/loss"] == pytest.approx(alone[key]["train/loss"], rel=5e-3), name
            else:
                compare(report[name], alone[key], rel=1e-10 if job.get("precision") == "64-true" else 5e-6)


@pytest.mark.parametrize("jobs", [TWO, pytest.param(MORE, marks=pytest.mark.slow)], ids=["quick", "more"])
def test_two_ranks_share_experts(folder, jobs):
    check(folder, 2, jobs)


@pytest.mark.slow
def test_four_ranks_share_experts_beside_every_other_dimension(folder):
    check(folder, 4, FOUR)


@pytest.mark.soak
def test_eight_ranks_share_experts(folder):
    check(folder, 8, {name: {"strategy": sizes, "steps": 4, **MUON, **STAGES} for name, sizes in EIGHT.items()})


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [DEGREES, ROWS], ids=["degrees", "rows"])
def test_a_checkpoint_of_any_expert_degree_continues_at_any_other(folder, degrees):
    """Saved after two steps of four by each, and continued by itself and the next: the losses of an uninterrupted run."""
    job = {**JOB, "steps": 4, "optimizer": "NorMuon", "parameters": False, "validate": False}
    if degrees is ROWS:
        job["settings"] = {"moe": {**MOE, "experts": 2}, "n_layer": 2}
    saves = {
        f"save {name}": {
            **job,
            "strategy": sizes,
            "save_at": 2,
            "to": name,
            "sharded": name != "ep 2",
            "background": name in ("ep 4", "whole"),
        }
        for name, sizes in degrees.items()
    }
    loads = {
        f"{old} → {new}": {**job, "strategy": sizes, "resume": f"{old}/step-00000002.ckpt"}
        for number, old in enumerate(degrees)
        for place, (new, sizes) in enumerate(degrees.items())
        if (place - number) % len(degrees) < 2
    }
    (folder / "jobs.json").write_text(json.dumps(saves | loads))
    report = run_ranks(Path(layouts.__file__), 4, folder, folder / "jobs.json", timeout=400)[0]
    alone = layouts.train(folder, **job)
    for name in saves:
        assert report[name]["train/loss"] == pytest.approx(alone["train/loss"], rel=5e-6), name
    for name in loads:
        assert report[name]["steps"] == [3, 4]
        assert report[name]["train/loss"] == pytest.approx(alone["train/loss"][2:], rel=5e-6), name
        assert report[name]["biases"] == alone["biases"], name
    for old in degrees:  # the checkpoint and the layout that wrote it: bit for bit
        assert report[f"{old} → {old}"]["train/loss"] == report[f"save {old}"]["train/loss"][2:]
    [one] = {json.dumps(layouts.train(folder, **job, resume=f"{old}/step-00000002.ckpt")["load"]) for old in degrees}
    assert json.loads(one) == alone["load"][2:]

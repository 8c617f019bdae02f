"""Multi-token prediction on ranks that share weights, positions, heads or layers trains what one process trains."""

import layouts
import pytest
import torch
from test_strategies import make, run

EXACT = {"precision": "64-true", "optimizer": "AdamW-fused"}
MUON = {"optimizer": "MuonAdamW"}
AHEAD = {"predict_ahead": 2}
PACKED = {"model": "llama", "packed": True}  # document masks, windows, a length that no number of ranks divides
TIED = {"model": "gpt2", "loss": {"chunk_size": 24, "z_loss": 1e-3, "ahead_weight": 0.7}}
MOE = {"settings": {**AHEAD, "n_layer": 2, "moe": {"experts": 4, "top_k": 2, "expert_width": 24, "balance": 0.1}}}
TWO = {
    "ddp, ignored targets": {"strategy": "ddp", "ignoring": True, **EXACT},
    "fsdp2, packed": {"strategy": {"shard": 2}, **PACKED, **EXACT},
    "fsdp2, tied, recomputation, Muon": {
        **{"strategy": {"shard": 2, "reshard_after_forward": True}, "compute": {"activation_checkpointing": "full"}},
        **{"ignoring": True, **TIED, **MUON},
    },
    "fsdp2, experts": {"strategy": {"shard": 2, "expert": 2}, **MOE, "ignoring": True, **MUON},
    "tensor, dropout": {"strategy": {"tensor_parallel": 2}, "settings": {**AHEAD, "dropout": 0.2}, **MUON},
    "tensor, tied, packed": {"strategy": {"tensor_parallel": 2}, **TIED, "packed": True, **EXACT},
    "stages": {"strategy": {"pipeline": 2}, **EXACT, "ignoring": True},
    "stages, tied, packed": {"strategy": {"pipeline": 2}, **TIED, "packed": True, **MUON},
    "stages, experts": {"strategy": {"pipeline": 2}, **MOE, "ignoring": True, **MUON},
    "context, packed": {"strategy": {"context": 2}, **PACKED, **EXACT},
    "context, one target": {"strategy": {"context": 2}, "ignoring": "all but the first of a chunk", **EXACT},
    "context, heads, ignored targets": {
        "strategy": {"context": 2, "context_attention": "heads"},
        **TIED,
        "ignoring": True,
        **EXACT,
    },
}
FOUR = {
    "fsdp2 x tensor": {"strategy": {"shard": 2, "tensor_parallel": 2}, **PACKED, **MUON},
    "context x tensor": {"strategy": {"context": 2, "tensor_parallel": 2}, **PACKED, "ignoring": True, **EXACT},
    "stages x fsdp2": {"strategy": {"pipeline": 2, "shard": 2}, "ignoring": True, **EXACT},
    "stages x tensor": {"strategy": {"pipeline": 2, "tensor_parallel": 2}, **MUON},
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cells"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_losses_norms_and_weights_equal_one_process(tmp_path, ranks, cells):
    jobs = {
        name: {"steps": 2, "settings": AHEAD, "parameters": True, "micro_batch_size": 1 if "stages" in name else 4, **job}
        for name, job in cells.items()
    }
    for job in jobs.values():
        if isinstance(job["strategy"], dict):
            job["strategy"] = {"shard": 1, **job["strategy"]}
        elif job["strategy"] == "ddp":
            job["micro_batch_size"] = 2
        if job["strategy"] != "ddp" and job["strategy"]["shard"] == 2:
            job["micro_batch_size"] = min(job["micro_batch_size"], 2)
    found, wrong = run(make(tmp_path), ranks, jobs), []
    for name, job in jobs.items():
        alone = layouts.train(tmp_path, **{key: value for key, value in job.items() if key != "strategy"})
        ours, bound = found[name], 1e-10 if "precision" in job else 5e-6
        for key in ("train/loss", "train/loss_ahead", "grad/norm"):
            difference = max(abs(a / b - 1) for a, b in zip(ours[key], alone[key], strict=True))
            if difference > bound:
                wrong.append((name, key, difference))
        if abs(ours["val/loss"] / alone["val/loss"] - 1) > bound:
            wrong.append((name, "val/loss", ours["val/loss"], alone["val/loss"]))
        difference = max((ours["parameters"][each] - value).abs().max().item() for each, value in alone["parameters"].items())
        if difference > (1e-9 if "precision" in job else 2e-4):
            wrong.append((name, "weights", difference))
    assert not wrong, "\n".join(map(str, wrong))
    assert all(torch.tensor(found[name]["train/loss_ahead"]).isfinite().all() for name in jobs)

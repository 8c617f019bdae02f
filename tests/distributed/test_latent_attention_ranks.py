"""Latent attention on ranks trains what one process trains: heads over ranks, and positions over ranks in both ways."""

import layouts
import pytest
from test_expert_parallel import check
from test_strategies import make

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("latent"))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "jobs"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_ranks_train_what_one_process_trains(folder, ranks, jobs):
    check(folder, ranks, jobs, JOB)


@pytest.mark.slow
def test_adapters_on_two_ranks(folder):
    layouts.train(folder, **{**JOB, **EXACT, "steps": 1, "to": "base", "validate": False})
    (folder / "base.ckpt").symlink_to(folder / "base/step-00000001.ckpt")
    check(folder, 2, LORA, JOB)

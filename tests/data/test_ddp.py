"""Two gloo processes read, between them, exactly what one process reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_llm.data import TokenShards
from lit_llm.data.order import sample_index
from lit_llm.ingest.shards import ShardWriter

SCRIPT = Path(__file__).with_name("ddp_script.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    for name, tokens in (("train", np.arange(203)), ("val", 500 + np.arange(60))):
        with ShardWriter(folder, name, vocab_size=1000, shard_tokens=64) as writer:
            writer.write(tokens)
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_each_rank_takes_its_slice_of_every_global_batch_in_order(ranks):
    # 25 samples of 8 tokens; token i of the stream is i.
    expected = (sample_index(np.arange(48), samples=25, seed=3) * 8).reshape(4, 2, 3, 2)  # step, rank, micro-batch, row
    for rank, result in enumerate(ranks):
        assert result["accumulate"] == 3
        assert [step for step, _ in result["train"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert [starts for _, starts in result["train"]] == expected[:, rank].reshape(12, 2).tolist()


def test_the_ranks_together_read_the_global_batches_of_one_process(folder, ranks):
    data = TokenShards(
        train=str(folder / "train_*.bin"),
        val=str(folder / "val_*.bin"),
        vocab_size=1000,
        block_size=8,
        global_batch_size=12,
        seed=3,
    )
    data.setup("fit")
    for step, batch in zip(range(4), data.train_dataloader(), strict=False):
        union = [start for result in ranks for at, starts in result["train"] if at == step for start in starts]
        assert union == batch["input_ids"][:, 0].tolist()


def test_the_ranks_together_validate_every_token_once_in_equally_many_batches(ranks):
    assert len(ranks[0]["val"]) == len(ranks[1]["val"]) == 2  # 8 blocks, 4 on each rank, 2 at a time
    seen = [target for result in ranks for _, targets in result["val"] for target in targets]
    assert sorted(seen) == list(range(501, 560))
    assert sum(counted for counted, _ in ranks[0]["val"]) == 59


def test_the_state_of_two_ranks_continues_on_one(folder):
    state = torch.load(folder / "end.ckpt", weights_only=True)["TokenShards"]
    assert state["consumed_samples"] == 48
    data = TokenShards(
        train=str(folder / "train_*.bin"),
        val=str(folder / "val_*.bin"),
        vocab_size=1000,
        block_size=8,
        global_batch_size=12,
        seed=3,
    )
    data.setup("fit")
    data.load_state_dict(state)
    batch = next(iter(data.train_dataloader()))
    assert (batch["input_ids"][:, 0] // 8).tolist() == sample_index(np.arange(48, 60), samples=25, seed=3).tolist()

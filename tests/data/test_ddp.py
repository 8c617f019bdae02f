"""Two gloo processes read, between them, exactly what one process reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from launch import run_ranks

from lit_llm.data import Bytes, TokenShards
from lit_llm.data.order import sample_index
from lit_llm.ingest.shard_manifest import Manifest, SplitInfo
from lit_llm.ingest.shards import ShardWriter

SCRIPT = Path(__file__).with_name("ddp_script.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    splits = {}
    for name, tokens in (("train", np.arange(203)), ("val", 500 + np.arange(60))):
        with ShardWriter(folder, name, vocab_size=1000, shard_tokens=64) as writer:
            writer.write(tokens)
        splits[name] = SplitInfo(0, 0, writer.tokens, 0, 0, writer.tokens_blake2b, tuple(writer.shards))
    Manifest("bytes", 1000, None, 256, splits).write(folder)
    Bytes().save(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(SCRIPT, 2, folder, folder)


def test_each_rank_takes_its_slice_of_every_global_batch_in_order(ranks):
    # 25 samples of 8 tokens; token i of the stream is i.
    expected = (sample_index(np.arange(48), samples=25, seed=3) * 8).reshape(4, 2, 3, 2)  # step, rank, micro-batch, row
    for rank, result in enumerate(ranks):
        assert result["accumulate"] == 3
        assert [step for step, _ in result["train"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert [starts for _, starts in result["train"]] == expected[:, rank].reshape(12, 2).tolist()


def test_the_ranks_together_validate_every_token_once_in_equally_many_batches(ranks):
    assert len(ranks[0]["val"]) == len(ranks[1]["val"]) == 2  # 8 blocks, 4 on each rank, 2 at a time
    seen = [target for result in ranks for _, targets in result["val"] for target in targets]
    assert sorted(seen) == list(range(501, 560))
    assert sum(counted for counted, _ in ranks[0]["val"]) == 59


def test_only_rank_0_looks_at_the_shards_to_start_and_the_others_know_what_it_found(ranks):
    seen = [[each for each in rank["seen_at_start"] if each.endswith(".bin") or "dir" in each] for rank in ranks]
    assert len(seen[0]) >= 5 and seen[1] == []
    for key in ("fingerprint", "eos_id", "text"):
        assert ranks[0][key] == ranks[1][key]
    states = [[state for state, _ in rank["files"].values()] for rank in ranks]
    assert states[0] == states[1] and all(states[0])
    assert (len(ranks[1]["files"]), ranks[1]["eos_id"], ranks[1]["text"]) == (5, 256, "Hi")


def test_a_problem_that_rank_0_finds_ends_every_rank_with_its_sentence(folder, ranks):
    first, second = ranks[0]["refusals"]
    assert first == f"No non-empty file matches {folder}/gone_*.bin: write shards with prepare (--data.train)."
    assert "holds token id 202, but the vocabulary has 100 ids" in second
    assert ranks[1]["refusals"] == ranks[0]["refusals"] and ranks[1]["seen_when_refused"] == []


def test_the_state_of_two_ranks_continues_on_one(folder, ranks):
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

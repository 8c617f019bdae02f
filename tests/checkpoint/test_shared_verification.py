"""Ranks hash the shards of a checkpoint together. What they find is remembered in the checkpoint, until it is repaired."""

import itertools
import json

import pytest
import torch
from saved import checkpoint, flip, step_path

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.shared_verification import share, verify_shards_together
from lit_llm.core.errors import UserError

SHARD = "shard-00000-of-00001.pt"


def save_shards(folder, *steps):
    for step in steps:
        parts = {"state_dict.a": {"offset": [0, 0], "part": torch.full((50, 40), float(step))}}
        placeholder = {"sharded tensor": "state_dict.a", "shape": [50, 40], "dtype": "float32"}
        disk_format.write(checkpoint(step, state_dict={"a": placeholder}), step_path(folder, step), parts=parts)


def test_every_shard_is_in_one_share_and_shares_are_nearly_equal():
    for ranks, count in itertools.product(range(1, 10), range(21)):
        names = [f"shard-{i:05d}" for i in range(count)]
        shares = [share(names, rank, ranks) for rank in range(ranks)]
        assert [name for each in shares for name in each] == names  # consecutive, and none twice
        assert {len(each) for each in shares} <= {count // ranks, -(-count // ranks)}


def test_a_damaged_shard_is_found_at_the_load_and_passed_by_at_the_next_start(tmp_path):
    save_shards(tmp_path, 1, 2)
    newest, before = step_path(tmp_path, 2), step_path(tmp_path, 1)
    flip(newest / SHARD, 8 * 1500)
    assert disk_format.newest_good(tmp_path, shards=False) == (newest, [])  # nobody has read the shard yet
    assert disk_format.read_values(newest)["global_step"] == 2
    with pytest.raises(UserError) as caught:
        verify_shards_together(newest)
    found = f"checkpoint {newest} is damaged: the contents of {SHARD} have changed since it was written"
    assert str(caught.value) == f"{found}. --resume auto takes the checkpoint before it from now on"
    record = newest / "damaged.json"
    assert json.loads(record.read_text()) == {"problem": f"the contents of {SHARD} have changed since it was written"}
    said = f"{found} (damaged.json remembers it, --resume {newest} checks it again)."
    assert disk_format.newest_good(tmp_path, shards=False) == (before, [said])
    assert disk_format.damage(newest) == f"{found}." and record.exists()
    flip(newest / SHARD, 8 * 1500)  # repaired
    assert disk_format.damage(newest) is None and not record.exists()
    assert disk_format.newest_good(tmp_path, shards=False) == (newest, [])


def test_sizes_and_what_is_not_a_shard_are_checked_at_once(tmp_path):
    save_shards(tmp_path, 1, 2, 3)
    with open(step_path(tmp_path, 3) / SHARD, "ab") as file:
        file.write(b"x")
    flip(step_path(tmp_path, 2) / "checkpoint.pt", 8 * 200)
    best, said = disk_format.newest_good(tmp_path, shards=False)
    assert best == step_path(tmp_path, 1)
    assert "it was written with" in said[0] and "checkpoint.pt have changed" in said[1]

"""Reading through few descriptors: many shards, forks, threads, files that change, document ends, manifests."""

from __future__ import annotations

import os
import pickle
import struct

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from lit_llm.core.errors import UserError
from lit_llm.data import TokenStream
from lit_llm.ingest.shard_manifest import Manifest, ShardInfo, SplitInfo
from lit_llm.ingest.shards import ShardWriter


def shards(folder, tokens, shard_tokens, documents=()):
    with ShardWriter(folder, "x", vocab_size=2**17, shard_tokens=shard_tokens) as writer:
        for part in np.split(np.asarray(tokens), documents):
            writer.write(part)
            if len(documents):
                writer.end_document()
    return writer


def open_files(folder):
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.readlink(link).startswith(str(folder)) for link in descriptors)


class Reads(Dataset):
    def __init__(self, stream):
        self.stream = stream

    def __len__(self):
        return len(self.stream)

    def __getitem__(self, i):
        return int(self.stream.read(i, 1, random=True)[0]), open_files(self.stream.paths[0].parent)


def test_many_more_shards_than_descriptors_are_read_in_random_order_also_by_workers(tmp_path):
    stream = TokenStream(shards(tmp_path, np.arange(300) * 5, 1).paths)
    order = np.random.default_rng(0).permutation(300).tolist()
    assert [int(stream.read(i, 1, random=True)[0]) for i in order] == [5 * i for i in order]
    assert 1 <= open_files(tmp_path) <= 128
    # Workers inherit the descriptors of this process by fork, and share their budget.
    found = list(DataLoader(Reads(stream), sampler=order, batch_size=None, num_workers=2))
    assert [token for token, _ in found] == [5 * i for i in order]
    assert max(opened for _, opened in found) <= 128


def test_descriptors_are_not_pickled_and_streams_with_equal_paths_share_none(tmp_path):
    writer = shards(tmp_path, [1, 2, 3], 10)
    stream = TokenStream(writer.paths)
    stream.read(0, 1)
    copy = pickle.loads(pickle.dumps(stream))
    writer.paths[0].unlink()
    again = TokenStream(shards(tmp_path, [7, 8, 9], 10).paths)  # another file of the same name
    assert again.read(0, 3).tolist() == copy.read(0, 3).tolist() == [7, 8, 9]
    assert stream.read(0, 3).tolist() == [1, 2, 3]  # of the file that it has open


def test_a_shard_that_is_cut_or_removed_while_training_is_named(tmp_path):
    first, second = shards(tmp_path, np.arange(20), 10).paths
    stream = TokenStream([first, second])
    os.truncate(first, 1024 + 4 * 7)
    assert stream.read(0, 7).tolist() == list(range(7))
    with pytest.raises(UserError, match=r"x_000000\.bin became shorter: 1052 bytes now, but bytes up to 1064 are read"):
        stream.read(5, 10)
    second.unlink()
    with pytest.raises(UserError, match=r"x_000001\.bin is gone"):
        stream.read(10, 1)


# -- document ends ------------------------------------------------------------------------------------------------------


def test_shards_without_ends_have_none_and_damaged_ones_are_named(tmp_path):
    stream = TokenStream(shards(tmp_path, np.arange(4), 4).paths)
    assert stream.layouts[0].document_ends() is None
    for content in (b"123", struct.pack("<Q", 5), struct.pack("<QQ", 3, 2), struct.pack("<QQ", 0, 2)):
        (tmp_path / "x_000000.docs").write_bytes(content)
        with pytest.raises(UserError, match=r"x_000000\.docs is damaged"):
            stream.layouts[0].document_ends()


# -- a manifest ---------------------------------------------------------------------------------------------------------


def listed(folder, shards, tokens_blake2b=None):
    """With a hash, the shards are a split; without one, a part of a split, which has none."""
    more = () if tokens_blake2b else (ShardInfo("more.bin", 1, 0, 1, ""),)
    split = SplitInfo(0, 0, 0, 0, 0, tokens_blake2b or "", (*shards, *more))
    manifest = Manifest("bytes", 2**17, None, None, {"train": split})
    return TokenStream.listed(folder, manifest, [shard.file for shard in shards])


def test_listed_shards_are_neither_opened_nor_scanned(tmp_path):
    writer = shards(tmp_path, [*range(9), 70_000], 4)
    same = TokenStream(writer.paths)
    for path in writer.paths:
        path.write_bytes(bytes(path.stat().st_size))  # what was in them cannot be read any more
    stream = listed(tmp_path, writer.shards, writer.tokens_blake2b)
    assert len(stream) == len(same) == 10 and stream.scan(70_001) == writer.tokens_blake2b
    with pytest.raises(UserError, match=r"x_000002\.bin holds token id 70000, but the vocabulary has 70000 ids"):
        stream.scan(70_000)
    assert listed(tmp_path, writer.shards).scan(70_001) != writer.tokens_blake2b  # without a hash, the tokens are read


def test_listed_shards_of_another_size_or_that_are_missing_are_named_together(tmp_path):
    writer = shards(tmp_path, np.arange(12), 4)
    with open(writer.paths[0], "ab") as file:
        file.write(b"x")
    os.truncate(writer.paths[1], 1030)
    lost = [*writer.shards[:2], ShardInfo("x_000009.bin", 4, 0, 11, "")]
    with pytest.raises(UserError) as error:
        listed(tmp_path, lost)
    long, short, missing = str(error.value).splitlines()
    assert "x_000000.bin is too long: meta.json says 4 tokens = 1040 bytes, but it has 1041. Restore" in long
    assert "x_000001.bin is truncated: meta.json says 4 tokens = 1040 bytes, but it has 1030. Restore" in short
    assert missing == f"Token shard not found: {tmp_path}/x_000009.bin."

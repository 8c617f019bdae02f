"""Document ends beside shards, and hashes of shards: against bytes and hashes made by hand."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lit_llm.core.errors import UserError
from lit_llm.data import TokenStream
from lit_llm.ingest.shard_manifest import ShardInfo
from lit_llm.ingest.shards import ShardWriter


def written(folder, documents, *, shard_tokens, vocab_size=300, ended=True):
    with ShardWriter(folder, "x", vocab_size=vocab_size, shard_tokens=shard_tokens) as writer:
        for document in documents:
            writer.write(np.array(document, dtype=np.int64))
            if ended:
                writer.end_document()
    return writer


def test_document_ends_stand_beside_the_shard_that_has_the_last_token(tmp_path):
    # 3 + 5 + 4 + 1 tokens in shards of 4: ends at 3, 8, 12, 13 of the split.
    writer = written(tmp_path, [[1, 2, 3], [4, 5, 6, 7, 8], [], [9, 10, 11, 12], [13]], shard_tokens=4)
    docs = [(tmp_path / f"x_{i:06d}.docs").read_bytes() for i in range(4)]
    assert docs == [struct.pack("<Q", 3), struct.pack("<Q", 4), struct.pack("<Q", 4), struct.pack("<Q", 1)]
    assert [shard.documents for shard in writer.shards] == [1, 1, 1, 1]
    assert (writer.documents, writer.tokens) == (4, 13)  # the empty one is none
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"x_{i:06d}{s}" for i in range(4) for s in (".bin", ".docs")]


def test_without_ends_there_are_no_docs_and_an_older_run_leaves_none(tmp_path):
    written(tmp_path, [[1, 2, 3], [4, 5]], shard_tokens=4)
    written(tmp_path, [[1, 2, 3], [4, 5]], shard_tokens=4, ended=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x_000000.bin", "x_000001.bin"]


@pytest.mark.parametrize(("vocab_size", "code"), [(65536, "H"), (65537, "I")])
def test_shards_are_described_by_counts_the_largest_id_and_hashes(tmp_path, vocab_size, code):
    writer = written(tmp_path, [[7, 65535, 1], [2, 3]], shard_tokens=4, vocab_size=vocab_size)

    def digest(content):
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    assert writer.shards == [
        ShardInfo(
            "x_000000.bin", 4, 1, 65535, digest(struct.pack(f"<4{code}", 7, 65535, 1, 2)), None, digest(struct.pack("<Q", 3))
        ),
        ShardInfo("x_000001.bin", 1, 1, 3, digest(struct.pack(f"<{code}", 3)), None, digest(struct.pack("<Q", 1))),
    ]
    for shard, path in zip(writer.shards, writer.paths, strict=True):
        assert digest(path.read_bytes()[1024:]) == shard.blake2b
    assert writer.tokens_blake2b == digest(struct.pack("<5I", 7, 65535, 1, 2, 3))


KILLED = """
import os, sys
import numpy as np
from lit_llm.ingest.shards import ShardWriter

folder, calls = sys.argv[1], int(sys.argv[2])
done = 0

def dying(call):
    def wrapper(*arguments, **options):
        global done
        if done == calls:
            os._exit(9)  # like SIGKILL before this operation
        done += 1
        return call(*arguments, **options)
    return wrapper

for name in ("replace", "unlink", "fsync"):
    setattr(os, name, dying(getattr(os, name)))
with ShardWriter(folder, "x", vocab_size=300, shard_tokens=4) as writer:
    for document in ([21, 22], [23, 24], [25, 26, 27]):
        writer.write(np.array(document))
        writer.end_document()
"""


def test_a_kill_before_any_operation_of_the_disk_leaves_tokens_and_ends_that_agree(tmp_path):
    before = {(1, 2, 3, 4): (1, 4), (5, 6, 7): (3,)}
    after = {(21, 22, 23, 24): (2, 4), (25, 26, 27): (3,)}
    code = None
    for calls in range(40):
        folder = tmp_path / str(calls)
        folder.mkdir()
        written(folder, [[1], [2, 3, 4], [5, 6, 7]], shard_tokens=4)
        command = [sys.executable, "-S", "-c", _with_path(KILLED), str(folder), str(calls)]
        code = subprocess.run(command, timeout=60).returncode
        for shard in folder.glob("*.bin"):
            content = shard.read_bytes()[1024:]
            tokens = struct.unpack(f"<{len(content) // 2}H", content)
            ends = shard.with_suffix(".docs").read_bytes()
            assert struct.unpack(f"<{len(ends) // 8}Q", ends) == (before | after)[tokens], (calls, shard.name)
        if code == 0:
            break
        assert code == 9
    assert calls >= 8 and code == 0


def _with_path(script: str) -> str:
    """The script with this process's import path, which `-S` (a faster start) leaves out."""
    paths = [str(Path(__file__).parents[2]), *sys.path]
    return f"import sys\nsys.path[:0] = {paths!r}\n{script}"


def hashed(content):
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def test_a_mask_is_a_byte_for_each_token_beside_its_shard(tmp_path):
    with ShardWriter(tmp_path, "x", vocab_size=300, shard_tokens=4, masked=True) as writer:
        writer.write(np.array([5, 6, 7]), np.array([0, 1, 1], np.uint8))
        writer.end_document()
        writer.write(np.array([8, 9, 5]), np.array([0, 0, 1], np.uint8))
        writer.end_document()
    assert (tmp_path / "x_000000.mask").read_bytes() == bytes([0, 1, 1, 0])
    assert (tmp_path / "x_000001.mask").read_bytes() == bytes([0, 1])
    assert [shard.mask_blake2b for shard in writer.shards] == [hashed(bytes([0, 1, 1, 0])), hashed(bytes([0, 1]))]
    assert (writer.targets, writer.mask_blake2b) == (3, hashed(bytes([0, 1, 1, 0, 0, 1])))
    assert sorted(path.name for path in tmp_path.glob("*.tmp")) == []

    stream = TokenStream(writer.paths)
    assert stream.read_mask(2, 3).tolist() == [1, 0, 0]  # across the shards
    other = stream.scan(300)
    (tmp_path / "x_000001.mask").write_bytes(bytes([1, 1]))
    assert TokenStream(writer.paths).scan(300) != other  # a run notices another mask
    (tmp_path / "x_000001.mask").write_bytes(bytes([1]))
    with pytest.raises(UserError, match=r"x_000001\.mask has 1 bytes, but .*x_000001\.bin has 2 tokens"):
        TokenStream(writer.paths)
    (tmp_path / "x_000001.mask").unlink()
    with pytest.raises(UserError, match=r"x_000000\.bin has a mask, but .*x_000001\.bin has none"):
        TokenStream(writer.paths)

"""Shards: the exact bytes of the format, reading across files, and every kind of broken file."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from lit_llm.data import token_stream as shards
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shards import ShardWriter


def write(folder, name, tokens, vocab_size=300, shard_tokens=1000):
    with ShardWriter(folder, name, vocab_size=vocab_size, shard_tokens=shard_tokens) as writer:
        writer.write(np.asarray(tokens))
    return writer.paths


def raw_shard(path, tokens, magic=20240520, version=1, count=None, code="H"):
    """A shard written by hand, with struct."""
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}{code}", *tokens))
    return path


@pytest.mark.parametrize(("vocab_size", "magic", "version", "code"), [(65536, 20240520, 1, "H"), (65537, 20240801, 7, "I")])
def test_a_shard_has_the_bytes_of_llm_c(tmp_path, vocab_size, magic, version, code):
    [path] = write(tmp_path, "train", [1, 2, 65535], vocab_size=vocab_size)
    assert path.name == "train_000000.bin"
    expected = raw_shard(tmp_path / "expected", [1, 2, 65535], magic, version, code=code)
    assert path.read_bytes() == expected.read_bytes()


def test_any_range_reads_as_if_the_shards_were_one_array(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 300, 37)
    stream = TokenStream(write(tmp_path, "x", tokens, shard_tokens=5))
    for start in range(38):
        for length in range(38 - start):
            np.testing.assert_array_equal(stream.read(start, length), tokens[start : start + length])


def test_an_interrupted_writer_leaves_no_files(tmp_path):
    with pytest.raises(KeyError), ShardWriter(tmp_path, "x", vocab_size=300, shard_tokens=4) as writer:
        writer.write(np.arange(6))
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["x_000000.bin"]  # complete, with its four tokens
    assert len(TokenStream([tmp_path / "x_000000.bin"])) == 4


def test_bare_uint16_needs_headerless_and_then_reads(tmp_path):
    tokens = np.arange(700, dtype="<u2")
    path = tmp_path / "nanogpt.bin"
    tokens.tofile(path)
    with pytest.raises(ValueError, match=r"starts with 65536 instead of .*20240520.*--data\.headerless true"):
        TokenStream([path])
    np.testing.assert_array_equal(TokenStream([path], headerless=True).read(0, 700), tokens)


def test_a_shard_with_a_header_is_not_read_as_headerless(tmp_path):
    path = raw_shard(tmp_path / "x.bin", [1, 2, 3])
    with pytest.raises(ValueError, match="headerless false"):
        TokenStream([path], headerless=True)
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="3 bytes"):
        TokenStream([tmp_path / "odd.bin"], headerless=True)


def test_every_broken_file_is_named_with_what_is_wrong(tmp_path):
    good = raw_shard(tmp_path / "good.bin", [1, 2, 3])
    cut = raw_shard(tmp_path / "cut.bin", [1, 2, 3], count=5)
    long = raw_shard(tmp_path / "long.bin", [1, 2, 3], count=2)
    version = raw_shard(tmp_path / "version.bin", [1, 2, 3], version=2)
    none = raw_shard(tmp_path / "none.bin", [], count=0)
    header = tmp_path / "header.bin"
    header.write_bytes(good.read_bytes()[:100])
    empty = tmp_path / "empty.bin"
    empty.touch()
    with pytest.raises(ValueError) as error:
        TokenStream([good, cut, long, version, none, header, empty, tmp_path / "missing.bin"])
    lines = str(error.value).split("\n")
    assert len(lines) == 7
    for line, words in zip(
        lines,
        [
            "cut.bin is truncated: its header says 5 tokens = 1034 bytes, but it has 1030.",
            "long.bin is too long: its header says 2 tokens = 1028 bytes, but it has 1030.",
            "version.bin is a token shard of version 2: only version 1 is supported",
            "none.bin has 0 tokens in its header",
            "header.bin is truncated: it has 100 bytes, but the header alone takes 1024",
            "empty.bin is not a token shard: it starts with None",
            "Token shard not found: " + str(tmp_path / "missing.bin"),
        ],
        strict=True,
    ):
        assert words in line


def test_a_token_beyond_the_vocabulary_is_found_and_placed(tmp_path):
    tokens = np.full(200_000, 256)  # more than one window of the scan
    tokens[150_123] = 257
    stream = TokenStream(write(tmp_path, "x", tokens, shard_tokens=100_000))
    with pytest.raises(ValueError, match=r"x_000001\.bin holds token id 257 at position 50123,.*257 ids.*vocab_size"):
        stream.scan(257)
    assert len(stream.scan(258)) == 32


def test_a_long_stream_is_sampled_from_its_first_to_its_last_token(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FULL_SCAN_TOKENS", 100_000)
    tokens = np.zeros(200_000, dtype=np.int64)
    for position in (0, 199_999):
        tokens[position] = 299
        with pytest.raises(ValueError, match=f"position {position}"):
            TokenStream(write(tmp_path, f"x{position}", tokens, shard_tokens=200_000)).scan(299)
        tokens[position] = 0

"""Megatron's pairs of .bin and .idx, written by hand with struct."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from lit_llm.core.errors import UserError
from lit_llm.data import TokenStream

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def pair(folder, sequences, documents, *, code=8, name="corpus"):
    """Write ``sequences`` (lists of ids) as Megatron does; ``documents`` are indices of sequences, the first 0."""
    char = CODES[code]
    width = struct.calcsize(char)
    (folder / f"{name}.bin").write_bytes(b"".join(struct.pack(f"<{len(s)}{char}", *s) for s in sequences))
    sizes = [len(s) for s in sequences]
    pointers = [width * sum(sizes[:i]) for i in range(len(sizes))]
    n, m = len(sequences), len(documents)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, n, m)
    index += struct.pack(f"<{n}i", *sizes) + struct.pack(f"<{n}q", *pointers) + struct.pack(f"<{m}q", *documents)
    (folder / f"{name}.idx").write_bytes(index)
    return folder / f"{name}.bin"


@pytest.mark.parametrize("code", CODES)
def test_tokens_of_every_integer_type_and_document_ends_are_read(tmp_path, code):
    # Documents: sequence 0; sequences 1 and 2; none; sequence 3.
    sequences = [[5, 6, 7], [100, 101], [102], [8, 9, 10, 11]]
    stream = TokenStream([pair(tmp_path, sequences, [0, 1, 3, 3, 4], code=code)])
    assert stream.read(0, len(stream)).tolist() == [5, 6, 7, 100, 101, 102, 8, 9, 10, 11]
    assert stream.read(4, 3).tolist() == [101, 102, 8] and stream.read(0, 2).dtype.kind == "u"
    ends = stream.layouts[0].document_ends()
    assert ends.dtype == np.uint64 and ends.tolist() == [3, 6, 10]


def test_a_pair_and_a_shard_of_ours_are_one_stream_with_the_same_hash(tmp_path):
    stream = TokenStream([pair(tmp_path, [[1, 2]], [0, 1], code=5, name="a"), pair(tmp_path, [[3]], [0, 1], name="b")])
    whole = TokenStream([pair(tmp_path, [[1, 2, 3]], [0, 1], code=4, name="c")])
    assert stream.read(0, 3).tolist() == [1, 2, 3]
    assert stream.scan(9) == whole.scan(9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b, i: b.write_bytes(b.read_bytes()[:-1]), r"corpus\.bin is truncated: .*corpus\.idx says 10 bytes, .* has 9\."),
        (lambda b, i: i.write_bytes(i.read_bytes()[:-1]), r"corpus\.idx is truncated: .*2 sequences and 3 .* = 82 .* has 81"),
        (lambda b, i: i.write_bytes(i.read_bytes()[:20]), r"corpus\.idx is truncated: it has 20 bytes, .* takes 34"),
        (lambda b, i: _patch(i, 9, struct.pack("<Q", 2)), "version 2: only version 1"),
        (lambda b, i: _patch(i, 17, b"\x07"), r"token type 7: token ids must be integers \(1, 2, 3, 4, 5, 8\)"),
        (lambda b, i: i.unlink(), r"is not a token shard.*headerless true"),
        (lambda b, i: i.write_bytes(b"other" * 9), "is not a token shard"),
    ],
)
def test_a_broken_pair_is_one_sentence(tmp_path, change, words):
    data = pair(tmp_path, [[1, 2, 3], [4, 5]], [0, 1, 2])
    change(data, data.with_suffix(".idx"))
    with pytest.raises(UserError, match=words) as error:
        TokenStream([data])
    assert "\n" not in str(error.value)


def _patch(path, at, content):
    path.write_bytes(path.read_bytes()[:at] + content + path.read_bytes()[at + len(content) :])


def test_damage_inside_the_index_is_found_when_document_ends_are_read(tmp_path):
    data = pair(tmp_path, [[1, 2, 3], [4, 5]], [0, 1, 2])
    for at, content in [(34, struct.pack("<i", 9)), (42, struct.pack("<q", 2)), (66, struct.pack("<q", 7))]:
        pair(tmp_path, [[1, 2, 3], [4, 5]], [0, 1, 2])
        _patch(data.with_suffix(".idx"), at, content)
        with pytest.raises(UserError, match=r"corpus\.idx is damaged"):
            TokenStream([data]).layouts[0].document_ends()

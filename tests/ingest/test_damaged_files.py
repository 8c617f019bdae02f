"""A damaged file gives documents or one sentence: no other exception, and no crash of the process."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import tarfile

import pyarrow as pa
import pytest
import zstandard
from documents_of import documents_of, write
from test_columns import arrow_file, arrow_stream, parquet, table_of
from test_tar_reader import tar_of

from lit_llm.core.errors import UserError

TEXTS = ["first", None, "", "é😀\n" * 50, "last"] * 3
LINES = b"".join(json.dumps({"id": i, "text": text, "meta": {"a": [1, text]}}).encode() + b"\n" for i, text in enumerate(TEXTS))
DICTIONARY = pa.dictionary(pa.int32(), pa.string())
FILES = {
    "parquet": parquet(table_of(TEXTS)),
    "parquet, zstd": parquet(table_of(TEXTS, DICTIONARY), compression="zstd", data_page_version="2.0"),
    "arrow file": arrow_file(table_of(TEXTS)),
    "arrow file, zstd": arrow_file(table_of(TEXTS), compression="zstd"),
    "arrow": arrow_stream(table_of(TEXTS, pa.large_string())),
    "arrow, dictionary": arrow_stream(table_of(TEXTS, DICTIONARY)),
    "arrow, views": arrow_stream(table_of(TEXTS, pa.string_view())),
    "tar": tar_of(("1.txt", b"a" * 700), ("2.json", b'{"text": "x"}'), ("x" * 150 + "/3.txt", b"z")),
    "tar, pax": tar_of(("1.txt", b"a" * 700), ("é" * 150 + "/3.txt", b"z"), format=tarfile.PAX_FORMAT),
    "jsonl": LINES,
    "gz": gzip.compress(LINES),
    "bz2": bz2.compress(LINES),
    "xz": lzma.compress(LINES),
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress(LINES),
}


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_any_damage_is_documents_or_one_sentence(tmp_path, count):
    rng = random.Random(count)
    refused = 0
    for _ in range(count):
        content = bytearray(rng.choice(list(FILES.values())))
        for _ in range(rng.choice([1, 1, 2, 5])):
            damage(content, rng)
        try:
            documents_of(write(tmp_path, bytes(content)))
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > count / 2


def damage(content: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(content))
    kind = rng.randrange(4)
    if kind == 0:
        content[at] = rng.randrange(256)
    elif kind == 1:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del content[at : at + rng.randrange(1, 9)]
    else:
        content[at:at] = rng.randbytes(rng.randrange(1, 5))

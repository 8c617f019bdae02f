"""Plain text and JSONL, compressed or not: the documents, and what is refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pytest
import zstandard
from documents_of import documents_of, refusal, write

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers import DocumentReader, ReadSettings
from lit_llm.ingest.source import Source

COMPRESSIONS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,  # as the command zstd does
}
TEXT = "".join(f"line {i} with an é\n" for i in range(5000)).encode()


def lines(*records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


# ---- Compression --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_each_compression_is_recognised_by_its_content_with_any_number_of_members(tmp_path, name):
    compress = COMPRESSIONS[name]
    assert documents_of(write(tmp_path, compress(TEXT), "a.txt")) == [TEXT]
    assert documents_of(write(tmp_path, compress(TEXT) + compress(b"more") + compress(b""), "b.log")) == [TEXT + b"more"]
    assert documents_of(write(tmp_path, compress(b""), "c")) == []
    assert documents_of(write(tmp_path, compress(lines({"text": "x"}, {"text": "y"})), "d.txt")) == [b"x", b"y"]
    assert documents_of(write(tmp_path, compress(TEXT) + bytes(512), "padded")) == [TEXT]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_truncated_or_damaged_file_is_one_sentence(tmp_path, name):
    whole = COMPRESSIONS[name](TEXT)
    for length in (len(whole) - 1, len(whole) // 2, 20):
        assert "truncated" in refusal(write(tmp_path, whole[:length]))
    assert "truncated" in refusal(write(tmp_path, whole + whole[:-5]))
    assert "cannot be decompressed" in refusal(write(tmp_path, whole + b"something else"))
    middle = len(whole) // 2
    assert "again" in refusal(write(tmp_path, whole[:middle] + b"\xff\x00\xff\x00" + whole[middle + 4 :]))


# ---- Plain text ---------------------------------------------------------------------------------------------------


def test_a_range_of_a_text_file_is_read(tmp_path):
    path = write(tmp_path, TEXT)
    with DocumentReader(Source.local(path), ReadSettings(), start=6, stop=70_000) as reader:
        assert b"".join(piece.text for piece in reader) == TEXT[6:70_000]
        assert reader.position == 70_000
        assert reader.format == "text"
    with DocumentReader(Source.local(path), ReadSettings(), start=6, stop=6) as reader:
        assert list(reader) == []


def test_a_file_that_becomes_shorter_is_refused(tmp_path):
    path = write(tmp_path, TEXT)
    with DocumentReader(Source.local(path), ReadSettings()) as reader:
        path.write_bytes(b"")
        with pytest.raises(UserError, match="shorter"):
            list(reader)


def test_an_empty_file_has_no_document(tmp_path):
    for wanted in ("auto", "text", "jsonl", "parquet", "arrow", "tar"):
        assert documents_of(write(tmp_path, b""), format=wanted) == []


# ---- JSONL --------------------------------------------------------------------------------------------------------


def test_keys_lead_into_objects_and_a_key_with_dots_wins(tmp_path):
    path = write(tmp_path, lines({"meta": {"body": "a"}}, {"meta": {"body": "b"}, "meta.body": "c"}, {"meta": None}))
    assert documents_of(path, text_key="meta.body") == [b"a", b"c"]


def test_null_and_empty_texts_are_skipped_and_counted(tmp_path):
    path = write(tmp_path, lines({"text": None}, {"text": "a"}, {"text": ""}, {"text": " "}))
    with DocumentReader(Source.local(path), ReadSettings()) as reader:
        assert [piece.text for piece in reader] == [b"a", b" "]
        assert reader.skipped == 2
        assert reader.format == "jsonl"
        assert reader.position == path.stat().st_size


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path):
    content = b'{"text": "\\ud83d|\\ude00\\ud83d\\ude00\\ud83d"}'
    assert documents_of(write(tmp_path, content)) == ["�|�😀�".encode()]


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        (lines({"text": "a"}, {"id": 1, "content": "b"}), "text", ["line 2", "'text'", "id, content", "--data.text_key"]),
        (lines({"id": 1, "meta": {"title": "b", "lang": 1}}), "meta.body", ["line 1", "id, meta.title, meta.lang"]),
        (lines({"messages": []}), "text", ["line 1", "it has messages", "--data.text_key", "prepare", "--chat_template auto"]),
        (lines({"text": "a"}, {"text": 5}), "text", ["line 2", "a number", "'text'"]),
        (lines({"text": ["a", "b"]}), "text", ["an array"]),
        (lines({"text": "a"}) + b'{"text": "b"\n', "text", ["line 2", "not a valid JSON object"]),
        (lines({"text": "a"}) + b'{"text": "caf\xe9 and more"}\n', "text", ["line 2", "not UTF-8", "iconv"]),
    ],
)
def test_what_is_wrong_with_a_line_is_one_sentence(tmp_path, content, key, words):
    message = refusal(write(tmp_path, content), text_key=key)
    assert [word for word in words if word not in message] == []


def test_a_long_first_line_is_recognised(tmp_path):
    path = write(tmp_path, lines({"id": "é" * 200_000, "text": "a"}, {"text": "b"}))
    assert documents_of(path) == [b"a", b"b"]
    assert len(documents_of(write(tmp_path, b"{" + b"x = 1; " * 20_000 + b"}"))) == 1  # minified code

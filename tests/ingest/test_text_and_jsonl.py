"""Plain text and JSONL, compressed or not: the documents, and what is refused."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import sys

import pytest
import zstandard
from documents_of import documents_of, forward_only, refusal, write

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers import DocumentReader, ReadSettings, interface
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
    assert "damaged" in refusal(write(tmp_path, whole + b"something else"))
    middle = len(whole) // 2
    assert "damaged" in refusal(write(tmp_path, whole[:middle] + b"\xff\x00\xff\x00" + whole[middle + 4 :]))


def test_zst_with_several_kinds_of_frames(tmp_path):
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(TEXT)
    assert documents_of(write(tmp_path, skippable + frame + skippable + frame)) == [TEXT + TEXT]


def test_a_zst_file_that_needs_much_memory_is_refused(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    assert "1024 MiB" in refusal(write(tmp_path, packer.compress(TEXT) + packer.flush()))


# ---- Plain text ---------------------------------------------------------------------------------------------------


def test_a_range_of_a_text_file_is_read(tmp_path):
    path = write(tmp_path, TEXT)
    with DocumentReader(Source.local(path), ReadSettings(), start=6, stop=70_000) as reader:
        assert b"".join(piece.text for piece in reader) == TEXT[6:70_000]
        assert reader.position == 70_000
        assert reader.format == "text"
    with DocumentReader(Source.local(path), ReadSettings(), start=6, stop=6) as reader:
        assert list(reader) == []


def test_a_range_of_a_file_that_cannot_seek_is_read(monkeypatch):
    with DocumentReader(forward_only(monkeypatch, TEXT), ReadSettings(), start=70_000, stop=80_000) as reader:
        assert b"".join(piece.text for piece in reader) == TEXT[70_000:80_000]


def test_a_server_need_not_tell_the_size(monkeypatch):
    source = dataclasses.replace(forward_only(monkeypatch, gzip.compress(TEXT) + gzip.compress(b"more")), size=0)
    with DocumentReader(source, ReadSettings()) as reader:
        assert b"".join(piece.text for piece in reader) == TEXT + b"more"
    with DocumentReader(dataclasses.replace(forward_only(monkeypatch, TEXT), size=0), ReadSettings()) as reader:
        assert b"".join(piece.text for piece in reader) == TEXT


@pytest.mark.parametrize("name", ["bz2", "lzma"])
def test_a_python_without_a_compression_says_so(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # importing it fails, as in a Python built without its library
    compression = "xz" if name == "lzma" else name
    assert f"built without {name}" in refusal(write(tmp_path, COMPRESSIONS[compression](TEXT)))
    assert documents_of(write(tmp_path, gzip.compress(TEXT))) == [TEXT]


@pytest.mark.parametrize("content", [gzip.compress(TEXT), lines({"text": "a"})], ids=["gz", "jsonl"])
def test_only_plain_text_is_read_in_part(tmp_path, content):
    with pytest.raises(ValueError, match="only plain text"):
        DocumentReader(Source.local(write(tmp_path, content)), ReadSettings(), start=1)


def test_compressed_text_is_cut_like_plain_text(tmp_path, monkeypatch):
    monkeypatch.setattr(interface, "PIECE_BYTES", 1000)
    found = []
    for content in (TEXT, gzip.compress(TEXT), bz2.compress(TEXT)):
        with DocumentReader(Source.local(write(tmp_path, content)), ReadSettings()) as reader:
            found.append(list(reader))
    assert len(found[0]) > 50
    assert [piece.last for piece in found[0]] == [False] * (len(found[0]) - 1) + [True]
    assert found[0] == found[1] == found[2]


def test_a_file_that_becomes_shorter_is_refused(tmp_path):
    path = write(tmp_path, TEXT)
    with DocumentReader(Source.local(path), ReadSettings()) as reader:
        path.write_bytes(b"")
        with pytest.raises(UserError, match="shorter"):
            list(reader)


@pytest.mark.parametrize(
    "content",
    [
        b"{ int x; }\n{ int y; }\n",
        b"[1, 2, 3]\n",
        b"{% for x in y %}\n",
        b'{"a"',
        b"caf\xe9 is Latin-1, a few letters of which are not UTF-8",
        b"\n\n",
    ],
)
def test_other_text_is_one_document_as_it_is(tmp_path, content):
    assert documents_of(write(tmp_path, content)) == [content]


def test_an_empty_file_has_no_document(tmp_path):
    for wanted in ("auto", "text", "jsonl", "parquet", "arrow", "tar"):
        assert documents_of(write(tmp_path, b""), format=wanted) == []


# ---- JSONL --------------------------------------------------------------------------------------------------------


def test_keys_lead_into_objects_and_a_key_with_dots_wins(tmp_path):
    path = write(tmp_path, lines({"meta": {"body": "a"}}, {"meta": {"body": "b"}, "meta.body": "c"}, {"meta": None}))
    assert documents_of(path, text_key="meta.body") == [b"a", b"c"]


def test_blank_lines_a_byte_order_mark_and_any_line_end_are_fine(tmp_path):
    path = write(tmp_path, b'\xef\xbb\xbf\n{"text": "a"}\r\n\r\n  \n {"id": 1, "text": "\\u00e9\\n"} \n{"text":"z"}')
    assert documents_of(path) == [b"a", "é\n".encode(), b"z"]


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
        (lines({}), "text", ["line 1", "none", "--data.format text"]),
        (lines({"text": "a"}, {"text": 5}), "text", ["line 2", "a number", "'text'"]),
        (lines({"text": True}), "text", ["true or false"]),
        (lines({"text": ["a", "b"]}), "text", ["an array"]),
        (lines({"text": {"body": "x"}}), "text", ["an object"]),
        (lines({"text": "a"}) + b'{"text": "b"\n', "text", ["line 2", "not a valid JSON object"]),
        (lines({"text": "a"}) + b'{"text": "b', "text", ["line 2", "not a valid JSON object"]),
        (b'{"text": "a" "b"}\n' + lines({"text": "a"}), "text", ["line 1", "not a valid JSON object", "--data.format text"]),
        (lines({"text": "a"}) + b'{"text": "b"} {"text": "c"}\n', "text", ["line 2", "not a valid JSON object"]),
        (lines({"text": "a"}) + b'{"text": "caf\xe9 and more"}\n', "text", ["line 2", "not UTF-8", "iconv"]),
        (
            lines({"text": "a"}) + b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n",
            "text",
            ["line 2", "not a valid JSON object"],
        ),
    ],
)
def test_what_is_wrong_with_a_line_is_one_sentence(tmp_path, content, key, words):
    message = refusal(write(tmp_path, content), text_key=key)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("record", [["a"], "text", 3, None, True])
def test_a_line_that_is_no_object_is_refused(tmp_path, record):
    assert "line 2 is" in refusal(write(tmp_path, lines({"text": "a"}, record)))


def test_a_long_first_line_is_recognised(tmp_path):
    path = write(tmp_path, lines({"id": "é" * 200_000, "text": "a"}, {"text": "b"}))
    assert documents_of(path) == [b"a", b"b"]
    assert len(documents_of(write(tmp_path, b"{" + b"x = 1; " * 20_000 + b"}"))) == 1  # minified code


def test_a_json_array_of_objects_is_refused_with_the_command_that_converts_it(tmp_path):
    for indent in (None, 2):
        for count in (1, 6_000):
            content = json.dumps([{"text": "a"}] * count, indent=indent).encode()
            for wanted in ("auto", "jsonl"):
                assert "jq -c '.[]'" in refusal(write(tmp_path, content), format=wanted)
            assert documents_of(write(tmp_path, content), format="text") == [content]

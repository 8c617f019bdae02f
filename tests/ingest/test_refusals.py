"""Files that hold no text, or in a format that is not read, are refused by their content whatever their name is."""

from __future__ import annotations

import builtins
import gzip
import io
import sqlite3
import struct
import zipfile

import numpy as np
import pytest
from documents_of import documents_of, refusal, write
from missing_package import hide

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.readers import ReadSettings
from lit_llm.ingest.shards import ShardWriter

JSONL = b'{"text": "a"}\n'


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(5))
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.arange(5))
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy(), ["NumPy", "JSONL or Parquet"]),
        (npz(), ["zip", "unpack"]),
        (zipped(), ["zip", "unpack"]),
        (b"%PDF-1.7\nbinary", ["PDF", "pdftotext"]),
        (b"\x89HDF\r\n\x1a\n" + bytes(50), ["HDF5", "Parquet"]),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), ["image", "leave it out"]),
        (b"\xff\xd8\xff\xe0" + bytes(50), ["image"]),
        (b"\x7fELF" + bytes(50), ["program"]),
        (b"MZ\x90\x00\x03" + bytes(50), ["program"]),
        (b"MMIDIDX\x00\x00" + bytes(50), ["Megatron", "text it was made from"]),
        (b"PARE" + bytes(50), ["encrypted"]),
        (b"Obj\x01" + bytes(50), ["Avro"]),
        (b"\x04\x22\x4d\x18" + bytes(50), ["lz4 -d"]),
        (gzip.compress(gzip.compress(b"text")), ["twice"]),
        ("text in".encode("utf-16"), ["iconv -f UTF-16 -t UTF-8"]),
        ("text in".encode("utf-32"), ["iconv -f UTF-32 -t UTF-8"]),
        (b"\xfe\xff" + "text in".encode("utf-16-be"), ["iconv -f UTF-16 -t UTF-8"]),
        ("text in".encode("utf-16-le"), ["NUL"]),
        ("Текст в старой кодировке.".encode("cp1251"), ["not UTF-8", "iconv"]),
        (("Schöne Grüße aus Köln, über die Brücke am Dom.\n" * 50).encode("latin-1"), ["not UTF-8", "iconv"]),
        (np.arange(2000, dtype="<u2").tobytes(), ["NUL"]),
        (np.random.default_rng(0).integers(1, 256, 10**5, dtype=np.uint8).tobytes(), ["not UTF-8"]),
        (b"a" * 60_000 + b"\0", ["NUL"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_each_is_refused_with_what_it_is_and_how_to_mend_it(tmp_path, content, words):
    for name in ("file.txt", "file.jsonl", "file.parquet"):
        message = refusal(write(tmp_path, content, name))
        assert [word for word in words if word not in message] == []
    for wanted in ("jsonl", "parquet", "arrow", "tar"):
        refusal(write(tmp_path, content), format=wanted)


@pytest.mark.parametrize("vocab_size", [2**16, 2**17])
def test_token_shards_are_refused(tmp_path, vocab_size):
    with ShardWriter(tmp_path, "train", vocab_size=vocab_size, shard_tokens=100) as writer:
        writer.write(np.arange(50))
        writer.end_document()
    assert "--data TokenShards" in refusal(tmp_path / "train_000000.bin")


def test_a_database_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "a.txt") as database:
        database.execute("create table t (x)")
    assert "SQLite" in refusal(tmp_path / "a.txt")


@pytest.mark.parametrize(
    "content", [npy(), b"%PDF-1.7\n", bytes(100), JSONL, struct.pack("<ii", 20240520, 1), b"\xff\xfe"], ids=range(6)
)
def test_format_text_reads_anything_as_it_is_but_decompresses_it(tmp_path, content):
    assert documents_of(write(tmp_path, content), format="text") == [content]
    assert documents_of(write(tmp_path, gzip.compress(content)), format="text") == [content]


def test_a_format_refuses_a_file_of_another(tmp_path):
    for wanted in ("parquet", "arrow", "tar"):
        message = refusal(write(tmp_path, JSONL), format=wanted)
        assert f"is jsonl, not {wanted}" in message
        assert "--data.format" in message
    assert documents_of(write(tmp_path, JSONL), format="jsonl") == [b"a"]
    assert "line 1 is not a valid JSON object" in refusal(write(tmp_path, b"plain text\n"), format="jsonl")


def test_a_character_that_the_sniffed_part_cuts_is_no_sign_of_binary(tmp_path):
    for shift in range(4):
        content = b"x" * shift + "😀".encode() * 20_000
        assert documents_of(write(tmp_path, content)) == [content]


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize(
    "tail",
    [bytes(300_000), np.random.default_rng(0).bytes(300_000), "für älter ".encode("latin-1") * 30_000],
    ids=["NULs", "random", "latin-1"],
)
def test_what_follows_text_must_be_text(tmp_path, packed, tail):
    """The first bytes say that the file is text. The rest is held to the same rules, unless the user gives the format."""
    line = b"The quick brown fox.\n"
    near, far = (write(tmp_path, packed(line * lines + tail), str(lines)) for lines in (6_000, 60_000))
    refusal(near)
    assert 262_144 < int(refusal(far).partition("from byte ")[2].split()[0].replace(",", "")) <= 60_000 * len(line)
    assert documents_of(near, format="text") == [line * 6_000 + tail]


def test_settings_are_checked():
    with pytest.raises(UserError, match=r"'json'.*jsonl.*--data.format"):
        ReadSettings(format="json")
    with pytest.raises(UserError, match="text_key is empty"):
        ReadSettings(text_key="")


# ---- Packages that are not installed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "package"),
    [(b"PAR1", "pyarrow"), (b"ARROW1\0\0" + bytes(100), "pyarrow"), (b"\x28\xb5\x2f\xfd" + bytes(100), "zstandard")],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, content, package):
    hide(package, monkeypatch)
    with pytest.raises(UserError, match=f"{package}: pip install {package}"):
        documents_of(write(tmp_path, content))
    assert documents_of(write(tmp_path, gzip.compress(JSONL))) == [b"a"]


def test_a_package_that_is_broken_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import a_module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        need("broken_package", what="A test")
    assert need("json", what="A test") is __import__("json")
    assert need("builtins", what="A test") is builtins

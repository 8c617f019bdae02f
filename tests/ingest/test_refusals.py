"""Files that hold no text, or in a format that is not read, are refused by their content whatever their name is."""

from __future__ import annotations

import csv
import gzip
import io
import re
import struct
import sys
import zipfile

import numpy as np
import pytest
from documents_of import documents_of, refusal, write
from missing_package import hide

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers import ReadSettings

JSONL = b'{"text": "a"}\n'


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(5))
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
        (zipped(), ["zip", "unpack"]),
        (b"%PDF-1.7\nbinary", ["PDF", "pdftotext"]),
        (b"MMIDIDX\x00\x00" + bytes(50), ["Megatron", "text it was made from"]),
        (b"Obj\x01" + bytes(50), ["Avro"]),
        (b"\x04\x22\x4d\x18" + bytes(50), ["lz4 -d"]),
        (gzip.compress(gzip.compress(b"text")), ["twice"]),
        ("text in".encode("utf-16"), ["iconv -f UTF-16 -t UTF-8"]),
        ("text in".encode("utf-32"), ["iconv -f UTF-32 -t UTF-8"]),
        (("Schöne Grüße aus Köln, über die Brücke am Dom.\n" * 50).encode("latin-1"), ["not UTF-8", "iconv"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_each_is_refused_with_what_it_is_and_how_to_mend_it(tmp_path, content, words):
    for name in ("file.txt", "file.jsonl", "file.parquet"):
        message = refusal(write(tmp_path, content, name))
        assert [word for word in words if word not in message] == []
    for wanted in ("jsonl", "parquet", "arrow", "tar"):
        refusal(write(tmp_path, content), format=wanted)


@pytest.mark.parametrize("name", ["file.csv", "file.tsv", "FILE.CSV.gz"])
def test_a_table_is_refused_with_a_command_that_converts_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    table = io.StringIO()
    rows = [{"id": i, "text": f'line {i}, with a tab\t,\n\nand "quotes" ' * 20} for i in range(3)]
    if "tsv" in name:  # without quoting
        rows = [{"id": i, "text": f'"line {i} begins with a quote'} for i in range(3)]
        table.writelines(["id\ttext\n", *(f"{row['id']}\t{row['text']}\n" for row in rows)])
    else:
        writer = csv.DictWriter(table, ["id", "text"])
        writer.writeheader()
        writer.writerows(rows)
    content = table.getvalue().encode()
    path = write(tmp_path, gzip.compress(content) if name.endswith("gz") else content, name)
    program = re.search(r"convert it with python -c '([^']*)' FILE FILE.parquet, or read", refusal(path))
    monkeypatch.setattr(sys, "argv", ["-c", str(path), "converted.parquet"])
    exec(program[1])
    assert documents_of(tmp_path / "converted.parquet") == [row["text"].encode() for row in rows]


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


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize(
    "tail",
    [bytes(300_000), "für älter ".encode("latin-1") * 30_000],
    ids=["NULs", "latin-1"],
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

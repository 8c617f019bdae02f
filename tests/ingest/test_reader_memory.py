"""A reader holds a small part of a file, also of one line of text, one member of a tar, one row group or one cell of 100 MB."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

pytestmark = pytest.mark.slow

# A process that reads one file: bytes of text, documents, and its largest resident size in MB. Not ru_maxrss, which starts
# with the size of the process that started it.
READ = """
import sys
from pathlib import Path
from lit_llm.ingest.readers import DocumentReader, ReadSettings
from lit_llm.ingest.source import Source
size = documents = 0
with DocumentReader(Source.local(Path(sys.argv[1])), ReadSettings()) as reader:
    for piece in reader:
        size += len(piece.text)
        documents += piece.last
        assert len(piece.text) < 2**20
status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
print(size, documents, int(status.split()[0]) // 1000)
"""

PART = "".join(f'word{i} \\ "é" 😀 ' for i in range(30_000))
PARTS = 100_000_000 // len(PART.encode()) + 1
BYTES = PARTS * len(PART.encode())


def read(path: Path) -> tuple[int, int, int]:
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    size, documents, peak = map(int, done.stdout.split())
    return size, documents, peak


def test_a_zst_file_of_one_letter_which_is_as_dense_as_can_be(tmp_path):
    with zstandard.open(tmp_path / "f", "wb") as file:
        for _ in range(300):
            file.write(b"a" * 10**6)
    assert (tmp_path / "f").stat().st_size < 50_000
    size, documents, peak = read(tmp_path / "f")
    assert (size, documents) == (300_000_000, 1)
    assert peak < 160


def test_text_of_100_mb_without_a_line_end(tmp_path):
    with open(tmp_path / "f", "wb") as file:
        for _ in range(PARTS):
            file.write(PART.encode())
    size, documents, peak = read(tmp_path / "f")
    assert (size, documents) == (BYTES, 1)
    assert peak < 60


def test_a_text_of_100_mb_in_a_tar(tmp_path):
    with open(tmp_path / "member", "wb") as file:
        for _ in range(PARTS):
            file.write(PART.encode())
    with tarfile.open(tmp_path / "f", "w") as archive:
        archive.add(tmp_path / "member", "1.txt")
    size, documents, peak = read(tmp_path / "f")
    assert (size, documents) == (BYTES, 1)
    assert peak < 60


def test_a_row_group_of_300_mb_of_parquet(tmp_path):
    texts = [f"{i} {PART[:3000]}" for i in range(30_000)]
    total = sum(len(text.encode()) for text in texts) * 3
    table = pa.table({"text": texts * 3, "other": texts * 3})
    assert total > 270_000_000
    pq.write_table(table, tmp_path / "f", row_group_size=10**7, use_dictionary=False, compression="zstd")
    assert pq.ParquetFile(tmp_path / "f").num_row_groups == 1
    del table
    size, documents, peak = read(tmp_path / "f")
    assert (size, documents) == (total, 90_000)
    assert peak < 200  # pyarrow itself takes 61


@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pytest.param(pa.ipc.new_file, marks=pytest.mark.soak)])
def test_a_record_batch_with_cells_of_100_mb_of_arrow(tmp_path, kind):
    text = PART * PARTS
    batch = pa.record_batch({"text": [text, text], "other": [text, text]})
    with kind(str(tmp_path / "f"), batch.schema) as writer:
        writer.write_batch(batch)
    total = 2 * len(text.encode())
    assert total > 198_000_000
    size, documents, peak = read(tmp_path / "f")
    assert (size, documents) == (total, 2)
    assert peak < 150  # pyarrow itself takes 61

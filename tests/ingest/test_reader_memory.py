"""A reader holds a small part of a file, also of one line of text, one member of a tar or one row group."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

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

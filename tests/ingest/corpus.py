"""A small corpus in every format, and a plain way to say which tokens it should become."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

_WORDS = "alpha beta gamma délta 東京 the of and 12 3.5 def return x() {y} 😀 it's we'll"
_NAMES = "a.jsonl b.jsonl.gz c.jsonl.zst d.jsonl.bz2 e.jsonl.xz f.parquet g.arrow h.arrows i.tar j.tar.gz"
WORDS, NAMES = [*_WORDS.split(), "\n", "\n\n"], _NAMES.split()


def texts(count: int, seed: int) -> list[str]:
    """Random documents; a few are long, and a few are short."""
    draw = random.Random(seed)
    lengths = [draw.choice((1, 5, 40, 400, 3000)) for _ in range(count)]
    return [" ".join(draw.choices(WORDS, k=length)) or "x" for length in lengths]


def write_formats(folder: Path, *, count: int = 30) -> dict[str, list[str]]:
    """One file of each format; name → its documents in order."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = {name: texts(count, seed) for seed, name in enumerate(NAMES)}
    for name, made in documents.items():
        (folder / name).write_bytes(_content(name, made))
    documents["k.txt"] = ["\n".join(texts(5, 99))]
    (folder / "k.txt").write_text(documents["k.txt"][0])
    return documents


def _content(name: str, documents: list[str]) -> bytes:
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)).encode()
    table = pa.table({"id": list(range(len(documents))), "text": documents})
    sink = io.BytesIO()
    if name.endswith("jsonl"):
        return lines
    if name.endswith(".jsonl.gz"):
        return gzip.compress(lines)
    if name.endswith(".zst"):
        return zstandard.compress(lines)
    if name.endswith(".bz2"):
        return bz2.compress(lines)
    if name.endswith(".xz"):
        return lzma.compress(lines)
    if name.endswith(".parquet"):
        pq.write_table(table, sink, row_group_size=7)
    elif name.endswith(".arrow"):
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    elif name.endswith(".arrows"):
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    else:
        with tarfile.open(fileobj=sink, mode="w:gz" if name.endswith("gz") else "w") as archive:
            for i, text in enumerate(documents):
                member = tarfile.TarInfo(f"{i:05d}.txt")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
    return sink.getvalue()

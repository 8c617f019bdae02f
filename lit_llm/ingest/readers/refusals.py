"""Known formats that are not read, and what to do with each."""

from __future__ import annotations

import re

_LEAVE_OUT = "leave it out"
_SHARD = "is a token shard, it holds tokens and no text: train on it with --data TokenShards --data.train FILE"

# The first bytes of a format, and what is said after the name of the file.
_REFUSALS: list[tuple[bytes, str]] = [
    (re.escape((20240520).to_bytes(4, "little")), _SHARD),
    (re.escape((20240801).to_bytes(4, "little")), _SHARD),
    (rb"MMIDIDX\x00\x00", "is a Megatron index, it holds tokens and no text: give the text it was made from"),
    (rb"\x93NUMPY", "is a NumPy array, not text: if it holds text, write it as JSONL or Parquet"),
    (rb"PK\x03\x04|PK\x05\x06", "is a zip archive (or npz, docx, xlsx …): unpack it and give the files of text"),
    (rb"7z\xbc\xaf\x27\x1c", "is a 7z archive: unpack it and give the files of text"),
    (rb"Rar!\x1a\x07", "is a RAR archive: unpack it and give the files of text"),
    (rb"\x04\x22\x4d\x18", "is compressed with lz4: decompress it with lz4 -d"),
    (rb"\x1f\x8b\x08|BZh[1-9]1AY&SY|\xfd7zXZ\x00|\x28\xb5\x2f\xfd", "is compressed twice: decompress it once"),
    (rb"%PDF-", "is a PDF: extract its text, for example with pdftotext"),
    (rb"\x89HDF\r\n\x1a\n", "is an HDF5 file: write its text as JSONL or Parquet"),
    (
        rb"SQLite format 3\x00",
        "is an SQLite database: write its text as JSONL, for example with sqlite3 -json FILE 'select …' | jq -c '.[]'",
    ),
    (rb"ORC", "is an ORC file: convert it to Parquet"),
    (rb"Obj\x01", "is an Avro file: convert it to Parquet"),
    (rb"FEA1", "is a Feather V1 file: convert it to Parquet"),
    (rb"PARE", "is an encrypted Parquet file: decrypt it"),
    (rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|II\*\x00|MM\x00\*|RIFF....WEBP", f"is an image: {_LEAVE_OUT}"),
    (rb"RIFF....(?:WAVE|AVI )|ID3[\x02-\x04]|OggS|fLaC|....ftyp", f"is a sound or a video: {_LEAVE_OUT}"),
    (rb"\x7fELF|MZ[^\n]{0,64}\x00|\xcf\xfa\xed\xfe|\xca\xfe\xba\xbe", f"is a program: {_LEAVE_OUT}"),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is an old Office file: save it as text"),
]
_PATTERNS = [(re.compile(start, re.DOTALL), sentence) for start, sentence in _REFUSALS]


def refusal_of(head: bytes) -> str | None:
    """What is wrong with a file that starts with ``head``: words to follow its name; None if it may be text."""
    return next((sentence for start, sentence in _PATTERNS if start.match(head)), None)

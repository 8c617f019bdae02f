"""Detect the format of a file by its first bytes, and put these bytes back in front of the rest of the stream."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers.arrow import FILE_START, is_arrow_stream
from lit_llm.ingest.readers.interface import Piece
from lit_llm.ingest.readers.plain_text import read_chunks, stream_of
from lit_llm.ingest.shards import LAYOUTS

HEAD_BYTES = 2**16
"""The number of bytes at the start of a file that decide its format."""

_MOST_INVALID = 0.005  # share of the bytes: Latin-1 text in German or French has 1 to 4 %, damaged UTF-8 less than this
_JSON_NAME = re.compile(r"\.(json|jsonl|jsonlines|ndjson)(\.(gz|bz2|xz|zst))?(\?…)?$", re.IGNORECASE)
_TABLE_NAME = re.compile(r"\.([ct])sv(\.(gz|bz2|xz|zst))?(\?…)?$", re.IGNORECASE)
# An object that is empty, or begins with a key in single or double quotes. Group 1 matches if the object is in an array.
_OBJECT = re.compile(
    rb"""[\s\x1e]*(\[\s*)?\{\s*(?:"(?:[^"\\\n]|\\.)*(?:"\s*:|\Z)|'(?:[^'\\\n]|\\.)*(?:'\s*:|\Z)|\}\s*(?:[\r\n]|\Z))"""
)
# How a line may begin before the first object of a JSONL file: with JSON, or a comment. `\x1e`: JSON text sequences.
_BEFORE_OBJECT = re.compile(rb"""[\s\x1e]*(?:[\[{"]|null\b|//|/\*)""")
_AS_TEXT = ", or read it as plain text (--data.format text)"

# Formats that cannot be read: a pattern of the first bytes, and the error message without the file's name at its start.
# `require_text` refuses other binary files, which have NUL bytes or are not UTF-8.
_REFUSALS: list[tuple[bytes, str]] = [
    (
        b"|".join(re.escape(magic.to_bytes(4, "little")) for magic in LAYOUTS),
        "is a token shard, it holds tokens and no text: train on it with --data TokenShards --data.train FILE",
    ),
    (rb"MMIDIDX\x00\x00", "is a Megatron index, it holds tokens and no text: give the text it was made from"),
    (rb"\x93NUMPY", "is a NumPy array, not text: if it holds text, write it as JSONL or Parquet"),
    (
        rb"PK\x03\x04|PK\x05\x06|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07",
        "is a zip, 7z or RAR archive (or npz, docx, xlsx …): unpack it and give the files of text",
    ),
    (rb"\x04\x22\x4d\x18", "is compressed with lz4: decompress it with lz4 -d"),
    (rb"\x1f\x8b\x08|BZh[1-9]1AY&SY|\xfd7zXZ\x00|\x28\xb5\x2f\xfd", "is compressed twice: decompress it once"),
    (rb"%PDF-", "is a PDF: extract its text, for example with pdftotext"),
    (
        rb"\x89HDF\r\n\x1a\n|SQLite format 3\x00|ORC|Obj\x01|FEA1",
        "is an HDF5, SQLite, ORC, Avro or Feather V1 file: write its text as JSONL or Parquet",
    ),
]


def detect(head: bytes, *, name: str) -> str:
    """Detect a file's format ("parquet", "arrow", "tar", "jsonl" or "text") in ``head``, its first ``HEAD_BYTES`` bytes.

    Args:
        name: the file's name, for messages.

    Raises:
        UserError: The file has no text, or has a format that cannot be read.
    """
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(FILE_START) or is_arrow_stream(head):
        return "arrow"
    if head[257:262] == b"ustar":
        return "tar"
    for start, refusal in _REFUSALS:
        if re.match(start, head, re.DOTALL):
            raise UserError(f"{name} {refusal}.")
    require_text(head, name=name)
    return _kind_of_text(head, name)


def require_text(head: bytes, *, name: str) -> None:
    """Check that ``head``, bytes of a file, are UTF-8 text.

    Raises:
        UserError: ``head`` is binary, or text in another encoding than UTF-8.
    """
    for encoding, marks in (("UTF-32", (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)), ("UTF-16", (b"\xff\xfe", b"\xfe\xff"))):
        if head.startswith(marks):
            raise UserError(f"{name} is {encoding}: convert it with iconv -f {encoding} -t UTF-8.")
    invalid = len(head) - len(head.decode("utf-8", "ignore").encode())
    if b"\0" in head:
        raise UserError(f"{name} is binary, it holds NUL bytes: leave it out, or read it as it is (--data.format text).")
    if invalid > max(3, _MOST_INVALID * len(head)):  # 3: the end of ``head`` may cut a character
        raise UserError(
            f"{name} is not UTF-8: convert it with iconv -f ITS_ENCODING -t UTF-8, leave it out if it is binary{_AS_TEXT}."
        )


def text_pieces(pieces: Iterable[Piece], *, name: str, start: int = 0) -> Iterator[Piece]:
    """Yield the pieces unchanged, after `require_text` has checked each: a file that begins as text must go on as text.

    Args:
        start: the position of the first piece in the file, in bytes.

    Raises:
        UserError: `require_text` refuses a piece.
    """
    for piece in pieces:
        require_text(piece.text, name=f"{name} from byte {start:,} on" if start else name)
        start += len(piece.text)
        yield piece


def _kind_of_text(head: bytes, name: str) -> str:
    """The format of UTF-8 text: "text" or "jsonl". Damaged JSON counts as "jsonl", so that the JSONL reader reports it.
    Raises a UserError for a table (csv or tsv, by its ``name``) and for a JSON array of objects."""
    if (table := _TABLE_NAME.search(name)) is not None:
        options = "newlines_in_values=True" if table[1].lower() == "c" else r'delimiter="\t", quote_char=False'
        read = f"c.read_csv(sys.argv[1], parse_options=c.ParseOptions({options}))"
        script = f"import sys, pyarrow.csv as c, pyarrow.parquet as p; p.write_table({read}, sys.argv[2])"
        raise UserError(f"{name} is a table: convert it with python -c '{script}' FILE FILE.parquet{_AS_TEXT}.")
    text = head.removeprefix(codecs.BOM_UTF8)
    if (start := _OBJECT.match(text)) is not None and start[1]:
        raise UserError(
            f"{name} is a JSON array of objects, not one object a line: convert it with "
            f"jq -c '.[]' FILE > FILE.jsonl{_AS_TEXT}."
        )
    # Damage or comments in the first lines must not turn a JSONL file into plain text.
    lines = itertools.takewhile(_BEFORE_OBJECT.match, (line for line in re.split(rb"[\r\n]+", text) if line.strip()))
    return "jsonl" if start or any(map(_OBJECT.match, lines)) or _JSON_NAME.search(name) else "text"


def read_head(stream: BinaryIO) -> bytes:
    """Read the first ``HEAD_BYTES`` bytes of ``stream``, or all bytes of a shorter stream, with as many reads as needed."""
    parts, missing = [], HEAD_BYTES
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def with_head(head: bytes, stream: BinaryIO) -> BinaryIO:
    """A stream that gives ``head``, then the rest of ``stream``. Its ``read(n)`` returns less than n bytes only at the end."""
    return stream_of(itertools.chain([head], read_chunks(stream)))

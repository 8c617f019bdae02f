"""Decide by its first bytes what a file is, and read them without losing them."""

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

HEAD_BYTES = 2**16
"""How much of a file decides its format."""

_MOST_INVALID = 0.005  # of the bytes. Latin-1 text in German or French has 1 to 4 %, UTF-8 with damage less than this.
_JSON_NAME = re.compile(r"\.(json|jsonl|jsonlines|ndjson)(\.(gz|bz2|xz|zst))?(\?…)?$", re.IGNORECASE)
# An object that begins with a key in quotes, of either kind, or is empty; group 1: in an array.
_OBJECT = re.compile(
    rb"""[\s\x1e]*(\[\s*)?\{\s*(?:"(?:[^"\\\n]|\\.)*(?:"\s*:|\Z)|'(?:[^'\\\n]|\\.)*(?:'\s*:|\Z)|\}\s*(?:[\r\n]|\Z))"""
)
# How a line may begin before the first object of a JSONL file: with JSON, or a comment. `\x1e`: JSON text sequences.
_BEFORE_OBJECT = re.compile(rb"""[\s\x1e]*(?:[\[{"]|null\b|//|/\*)""")
_AS_TEXT = ", or read it as plain text (--data.format text)"

_LEAVE_OUT = "leave it out"
_SHARD = "is a token shard, it holds tokens and no text: train on it with --data TokenShards --data.train FILE"

# Formats that are not read: the first bytes, and the rest of the message that begins with the file's name.
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


def detect(head: bytes, *, name: str) -> str:
    """The format of a file that starts with ``head``, the first ``HEAD_BYTES`` or all of it.

    Args:
        name: the file's name, for messages.

    Raises:
        UserError: The file holds no text, or in a format that is not read.
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
    """Refuse text that is binary or in an encoding other than UTF-8.

    Raises:
        UserError: It is.
    """
    for encoding, marks in (("UTF-32", (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)), ("UTF-16", (b"\xff\xfe", b"\xfe\xff"))):
        if head.startswith(marks):
            raise UserError(f"{name} is {encoding}: convert it with iconv -f {encoding} -t UTF-8.")
    invalid = len(head) - len(head.decode("utf-8", "ignore").encode())
    if b"\0" in head:
        raise UserError(f"{name} is binary, it holds NUL bytes: leave it out, or read it as it is (--data.format text).")
    if invalid > max(3, _MOST_INVALID * len(head)):  # 3: a character that the end of a head cuts
        raise UserError(
            f"{name} is not UTF-8: convert it with iconv -f ITS_ENCODING -t UTF-8, leave it out if it is binary{_AS_TEXT}."
        )


def text_pieces(pieces: Iterable[Piece], *, name: str, start: int = 0) -> Iterator[Piece]:
    """The same pieces. Each is held to the rules of a head, so that a file that begins as text cannot go on as something else.

    Args:
        start: the byte of the text that the first piece starts with.

    Raises:
        UserError: As `require_text`.
    """
    for piece in pieces:
        require_text(piece.text, name=f"{name} from byte {start:,} on" if start else name)
        start += len(piece.text)
        yield piece


def _kind_of_text(head: bytes, name: str) -> str:
    """text or jsonl. Damaged JSON is jsonl, whose reader says what is wrong: as text it would be learned with its braces."""
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
    """The first ``HEAD_BYTES`` of ``stream``, or all of it. A remote stream may return less than it is asked for."""
    parts, missing = [], HEAD_BYTES
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def with_head(head: bytes, stream: BinaryIO) -> BinaryIO:
    """A stream of ``head`` and what is left of ``stream``. Its ``read(n)`` returns less than n bytes at the end only."""
    return stream_of(itertools.chain([head], read_chunks(stream)))

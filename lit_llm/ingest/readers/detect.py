"""Decide by its first bytes what a file is."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from lit_llm.errors import UserError
from lit_llm.ingest.readers.arrow import FILE_START, is_arrow_stream
from lit_llm.ingest.readers.json_stream import JsonStream
from lit_llm.ingest.readers.refusals import refusal_of
from lit_llm.ingest.readers.stream import HEAD_BYTES

_MOST_INVALID = 0.005  # of the bytes. Latin-1 text in German or French has 1 to 4 %, UTF-8 with damage less than this.
_NO_KEY = "\0"
_AS_TEXT = ", or read it as plain text (--data.format text)"


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
    if (refusal := refusal_of(head)) is not None:
        raise UserError(f"{name} {refusal}.")
    require_text(head, name=name)
    return _kind_of_text(head, name)


def require_text(head: bytes, *, name: str) -> None:
    """Refuse a file that is binary or in an encoding other than UTF-8.

    Raises:
        UserError: It is.
    """
    for encoding, marks in (("UTF-32", (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)), ("UTF-16", (b"\xff\xfe", b"\xfe\xff"))):
        if head.startswith(marks):
            raise UserError(f"{name} is {encoding}: convert it with iconv -f {encoding} -t UTF-8.")
    invalid = len(head) - len(head.decode("utf-8", "ignore").encode())
    if b"\0" in head:
        raise UserError(f"{name} is binary, it holds NUL bytes: leave it out, or read it as it is (--data.format text).")
    if invalid > max(3, _MOST_INVALID * len(head)):  # 3: a character that the end of ``head`` cuts
        raise UserError(
            f"{name} is not UTF-8: convert it with iconv -f ITS_ENCODING -t UTF-8, leave it out if it is binary{_AS_TEXT}."
        )


def _kind_of_text(head: bytes, name: str) -> str:
    text = head.removeprefix(codecs.BOM_UTF8)
    whole = len(head) < HEAD_BYTES
    start = re.match(rb"\s*(?:(\{)|\[\s*\{)", text)
    if start is None:
        return "text"
    if not start[1]:
        if _begins_object(b'{"":', text, *([b"}"] if whole else []), whole=whole):
            raise UserError(
                f"{name} is a JSON array of objects, not one object a line: convert it with "
                f"jq -c '.[]' FILE > FILE.jsonl{_AS_TEXT}."
            )
        return "text"
    *lines, last = text.split(b"\n")
    if whole:
        lines.append(last)
    lines = [line for line in lines if line.strip()]
    if not lines:
        return "jsonl" if _begins_object(last, whole=False) else "text"
    # The second line too: a damaged first line must not turn a JSONL file into plain text.
    return "jsonl" if any(_begins_object(line, whole=True) for line in lines[:2]) else "text"


class _HeadEnds(Exception):
    pass


def _begins_object(*parts: bytes, whole: bool) -> bool:
    """Whether ``parts`` are a JSON object, or, unless ``whole``, may become one."""

    def chunks() -> Iterator[bytes]:
        yield from parts
        if not whole:
            raise _HeadEnds

    try:
        for _ in JsonStream(chunks(), "").text(_NO_KEY):
            pass
    except _HeadEnds:
        return True
    except ValueError:
        return False
    return True

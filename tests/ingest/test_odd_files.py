"""Text as its authors meant it, or a refusal: odd and damaged files, each against the documents that it holds."""

from __future__ import annotations

import gzip
import tarfile

import pytest
import zstandard
from documents_of import documents_of, refusal, write
from test_tar_reader import tar_of

MARK = b"\xef\xbb\xbf"
A, B = b'{"text": "a"}', b'{"text": "b"}'
TEXT_HINT = "--data.format text"


def zst(content: bytes, window: int = 20, *, checksum: bool = False) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=window, write_checksum=checksum)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(content) + compressor.flush()  # without the size, a frame needs its window


def link(kind: bytes, name: str) -> bytes:
    """A tar with a document, and a link to it as another member."""
    first = tar_of(("1.txt", b"a"))[:1024]
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "1.txt"
    return first + member.tobuf() + bytes(1024)


ORDINARY = {
    # Texts with an object in their second line.
    "Markdown with a fence of JSON": b'```json\n{"a": 1}\n```\n',
    "Python": b"DATA = (\n    {'a': 1},\n)\n",
    "YAML": b'---\n{"a": 1}\n',
}
READ = {
    # name of the file, content, documents
    **{case: ("f.txt", content, [content]) for case, content in ORDINARY.items()},
    "jsonl with CRLF and blank lines": ("f", b"\n" + A + b"\r\n\r\n" + B + b"\r\n", [b"a", b"b"]),
    "jsonl with a mark": ("f", MARK + A + b"\n" + B, [b"a", b"b"]),
    "two files with marks, joined": ("f", MARK + A + b"\n" + MARK + B + b"\n", [b"a", b"b"]),
    "spaces in an object": ("f", b' { "text" : "a" } \n', [b"a"]),
    "jsonl of another name": ("f.txt", A + b"\n" + B, [b"a", b"b"]),
    "a mark within text": ("f.txt", b"a" + MARK + b"b", [b"a" + MARK + b"b"]),
    "compressed text with a mark": ("f.gz", gzip.compress(MARK + b"a"), [b"a"]),
    "form feeds": ("f.txt", b"a\x0cb\x0b", [b"a\x0cb\x0b"]),
    "TeX": ("f.tex", b"{\\bf a} and {b}\n", [b"{\\bf a} and {b}\n"]),
    "a template": ("f.html", b"{% for x in y %}\n{{ x }}\n", [b"{% for x in y %}\n{{ x }}\n"]),
    "JSON far below": ("f.md", b"Example\n\n    x\n" + A + b"\n", [b"Example\n\n    x\n" + A + b"\n"]),
    "tar: text with a mark": ("f.tar", tar_of(("1.txt", MARK + b"a"), ("2.txt", MARK)), [b"a"]),
    "tar: JSON with a mark": ("f.tar", tar_of(("1.json", MARK + A)), [b"a"]),
    "tar: JSON over several lines": ("f.tar", tar_of(("1.json", b'{\n "text":\n "a"\n}\n')), [b"a"]),
    "tar: a link that is no text": ("f.tar", link(tarfile.SYMTYPE, "latest"), [b"a"]),
    "zst of two frames": ("f.zst", zst(b"a") + zst(b"b", 27), [b"ab"]),
    "not quite UTF-8": ("f.txt", b"caf\xe9", [b"caf\xe9"]),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_read(case, tmp_path):
    name, content, documents = READ[case]
    assert documents_of(write(tmp_path, content, name)) == documents


REFUSED = {
    # name of the file, content, words of the refusal
    "a JSON text sequence": ("f", b'\x1e{"text": "a"}\n\x1e{"text": "b"}\n', ["line 1", TEXT_HINT]),
    "an object over several lines": ("f", b'{\n  "text": "a"\n}\n', ["line 1", "jq -c .", TEXT_HINT]),
    "objects without lines": ("f", A + B, ["line 1", "not a valid JSON object", TEXT_HINT]),
    "CR between objects": ("f", A + b"\r" + B + b"\r", ["line 1", TEXT_HINT]),
    "dicts of Python": ("f", b"{'text': 'a'}\n{'text': 'b'}\n", ["line 1", TEXT_HINT]),
    "first null": ("f", b"null\n" + A + b"\n", ["line 1 is null", TEXT_HINT]),
    "first a comment": ("f", b"// c\n" + A + b"\n" + B, ["line 1", "not a valid JSON object", TEXT_HINT]),
    "text, called jsonl": ("f.JSONL", b"a\nb\n", ["line 1", "not a valid JSON object", TEXT_HINT]),
    "a table": ("f.CSV.gz", gzip.compress(b"a,b\n1,2\n"), ["convert it with python -c", TEXT_HINT]),
    "an array": ("f.json", b"[" + A + b"," + B + b"]", ["array", "jq -c '.[]'", TEXT_HINT]),
    "zst, the second frame with a large window": ("f.zst", zst(b"a") + zst(b"b", 28), ["too much memory"]),
    "zst, the second frame damaged": ("f.zst", zst(b"a") + b"\x28\xb5\x2f\xfd\xff\xff\xff\xff\xff\xff", ["f.zst"]),
    "zst, a wrong checksum": ("f.zst", zst(b"abc", checksum=True)[:-1] + b"\0", ["checksum"]),
    "tar: a hard link": ("f.tar", link(tarfile.LNKTYPE, "2.txt"), ["2.txt is a link to 1.txt", "--hard-dereference"]),
    "tar: a symbolic link": ("f.tar", link(tarfile.SYMTYPE, "2.json"), ["2.json is a link to 1.txt", "--dereference"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path):
    name, content, words = REFUSED[case]
    message = refusal(write(tmp_path, content, name))
    assert [word for word in words if word not in message] == [], message

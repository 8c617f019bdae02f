"""Text as its authors meant it, or a refusal: odd and damaged files, each against the documents that it holds."""

from __future__ import annotations

import bz2
import gzip
import lzma
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
    "a request": b'POST /v1/chat\n\n{"model": "x"}\n',
    "JavaScript": b"module.exports =\n{ 'semi': true }\n",
    "Python": b"DATA = (\n    {'a': 1},\n)\n",
    "YAML": b'---\n{"a": 1}\n',
}
READ = {
    # name of the file, content, documents
    **{case: ("f.txt", content, [content]) for case, content in ORDINARY.items()},
    "jsonl": ("f", A + b"\n" + B + b"\n", [b"a", b"b"]),
    "jsonl without a last line end": ("f.jsonl", A + b"\n" + B, [b"a", b"b"]),
    "jsonl with CRLF and blank lines": ("f", b"\n" + A + b"\r\n\r\n" + B + b"\r\n", [b"a", b"b"]),
    "jsonl with a mark": ("f", MARK + A + b"\n" + B, [b"a", b"b"]),
    "two files with marks, joined": ("f", MARK + A + b"\n" + MARK + B + b"\n", [b"a", b"b"]),
    "one object": ("f.json", A, [b"a"]),
    "one object and a CR": ("f", A + b"\r", [b"a"]),
    "spaces in an object": ("f", b' { "text" : "a" } \n', [b"a"]),
    "jsonl of another name": ("f.txt", A + b"\n" + B, [b"a", b"b"]),
    "only blank lines, called jsonl": ("f.jsonl", b"\n\n \n", []),
    "only a mark, called jsonl": ("f.jsonl", MARK, []),
    "an escaped mark": ("f", b'{"text": "\\ufeffa"}', [MARK + b"a"]),
    "a mark before text": ("f.txt", MARK + b"a", [b"a"]),
    "only a mark": ("f.txt", MARK, []),
    "a mark within text": ("f.txt", b"a" + MARK + b"b", [b"a" + MARK + b"b"]),
    "compressed text with a mark": ("f.gz", gzip.compress(MARK + b"a"), [b"a"]),
    "CR line ends": ("f.txt", b"a\rb\r", [b"a\rb\r"]),
    "form feeds": ("f.txt", b"a\x0cb\x0b", [b"a\x0cb\x0b"]),
    "TeX": ("f.tex", b"{\\bf a} and {b}\n", [b"{\\bf a} and {b}\n"]),
    "C": ("f.c", b"{ int x; }\n{ int y; }\n", [b"{ int x; }\n{ int y; }\n"]),
    "a template": ("f.html", b"{% for x in y %}\n{{ x }}\n", [b"{% for x in y %}\n{{ x }}\n"]),
    "CSS": ("f.css", b"{ color: red }\n", [b"{ color: red }\n"]),
    "footnotes": ("f.txt", b"[1] one\n[2] two\n", [b"[1] one\n[2] two\n"]),
    "quotes": ("f.txt", b'"a", she said.\n{b}\n', [b'"a", she said.\n{b}\n']),
    "JSON far below": ("f.md", b"Example\n\n    x\n" + A + b"\n", [b"Example\n\n    x\n" + A + b"\n"]),
    "tar: text with a mark": ("f.tar", tar_of(("1.txt", MARK + b"a"), ("2.txt", MARK)), [b"a"]),
    "tar: JSON with a mark": ("f.tar", tar_of(("1.json", MARK + A)), [b"a"]),
    "tar: JSON over several lines": ("f.tar", tar_of(("1.json", b'{\n "text":\n "a"\n}\n')), [b"a"]),
    "tar: a link that is no text": ("f.tar", link(tarfile.SYMTYPE, "latest"), [b"a"]),
    "zst of two frames": ("f.zst", zst(b"a") + zst(b"b", 27), [b"ab"]),
    "gz of two members": ("f.gz", gzip.compress(A + b"\n") + gzip.compress(B), [b"a", b"b"]),
    "not quite UTF-8": ("f.txt", b"caf\xe9", [b"caf\xe9"]),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_read(case, tmp_path):
    name, content, documents = READ[case]
    assert documents_of(write(tmp_path, content, name)) == documents


REFUSED = {
    # name of the file, content, words of the refusal
    "a JSON text sequence": ("f", b'\x1e{"text": "a"}\n\x1e{"text": "b"}\n', ["line 1", TEXT_HINT]),
    "two comments before the objects": ("f", b'// a\n// b\n{"text": "a"}\n', ["line 1", TEXT_HINT]),
    "an object over several lines": ("f", b'{\n  "text": "a"\n}\n', ["line 1", "jq -c .", TEXT_HINT]),
    "the same in CRLF": ("f.json", b'{\r\n  "text": "a"\r\n}\r\n', ["line 1", "jq -c .", TEXT_HINT]),
    "objects over several lines": ("f.txt", b'{\n  "text": "a"\n}\n{\n  "text": "b"\n}\n', ["line 1", TEXT_HINT]),
    "objects without lines": ("f", A + B, ["line 1", "not a valid JSON object", TEXT_HINT]),
    "objects without lines, twice": ("f", A + B + b"\n" + A + B, ["line 1", TEXT_HINT]),
    "objects with commas": ("f", A + b",\n" + B + b",\n", ["line 1", TEXT_HINT]),
    "raw tabs": ("f", b'{"text": "a\tb"}\n{"text": "a\tb"}\n', ["line 1", "not a valid JSON object", TEXT_HINT]),
    "raw line ends": ("f", b'{"text": "a\nb"}\n{"text": "a\nb"}\n', ["line 1", TEXT_HINT]),
    "CR between objects": ("f", A + b"\r" + B + b"\r", ["line 1", TEXT_HINT]),
    "dicts of Python": ("f", b"{'text': 'a'}\n{'text': 'b'}\n", ["line 1", TEXT_HINT]),
    "a list of dicts": ("f", b"[{'text': 'a'}, {'text': 'b'}]\n", ["array", TEXT_HINT]),
    "first null": ("f", b"null\n" + A + b"\n", ["line 1 is null", TEXT_HINT]),
    "first a comment": ("f", b"// c\n" + A + b"\n" + B, ["line 1", "not a valid JSON object", TEXT_HINT]),
    "first a comment, called jsonl": ("f.jsonl", b"# c\n# d\n# e\n" + A + b"\n", ["line 1", TEXT_HINT]),
    "first an array": ("f", b'["text"]\n' + A, ["line 1 is an array", TEXT_HINT]),
    "first damaged": ("f", b'{"text": "a\n' + B + b"\n", ["line 1", "not a valid JSON object", TEXT_HINT]),
    "second damaged": ("f", A + b"\n" + b'{"text": "b\n', ["line 2", "not a valid JSON object"]),
    "keys without quotes, called ndjson": ("f.ndjson", b"{text: 'a'}\n", ["line 1", TEXT_HINT]),
    "strings, called jsonl": ("f.jsonl", b'"a"\n"b"\n', ["line 1 is a string", TEXT_HINT]),
    "text, called jsonl": ("f.JSONL", b"a\nb\n", ["line 1", "not a valid JSON object", TEXT_HINT]),
    "a number, called json": ("f.json", b"12\n", ["line 1 is a number", TEXT_HINT]),
    "text, called jsonl.gz": ("f.jsonl.gz", gzip.compress(b"a\n"), ["line 1", TEXT_HINT]),
    "a cut object": ("f", b'{"text": "a', ["line 1", "not a valid JSON object", TEXT_HINT]),
    "a cut key": ("f", b'{"tex', ["line 1", "not a valid JSON object", TEXT_HINT]),
    "an array": ("f.json", b"[" + A + b"," + B + b"]", ["array", "jq -c '.[]'", TEXT_HINT]),
    "a cut array": ("f", b"[\n  " + A + b",\n", ["array", TEXT_HINT]),
    "another key": ("f", b'{"body": "a"}\n', ["line 1", "'text'", "body", "--data.text_key"]),
    "UTF-16": ("f.txt", "a text".encode("utf-16"), ["UTF-16", "iconv"]),
    "UTF-32": ("f.txt", "a text".encode("utf-32"), ["UTF-32", "iconv"]),
    "Latin-1": ("f.txt", "à é è ù ç".encode("latin-1"), ["not UTF-8", "iconv", TEXT_HINT]),
    "NUL bytes": ("f.txt", b"a\0b", ["NUL", TEXT_HINT]),
    "zst with a large window": ("f.zst", zst(b"a", 28), ["256 MiB", "--long"]),
    "zst, the second frame with a large window": ("f.zst", zst(b"a") + zst(b"b", 28), ["256 MiB", "--long"]),
    "zst, the second frame damaged": ("f.zst", zst(b"a") + b"\x28\xb5\x2f\xfd\xff\xff\xff\xff\xff\xff", ["f.zst"]),
    "zst, a wrong checksum": ("f.zst", zst(b"abc", checksum=True)[:-1] + b"\0", ["damaged"]),
    "gz cut": ("f.gz", gzip.compress(b"abc" * 50)[:-5], ["truncated"]),
    "bz2 cut": ("f.bz2", bz2.compress(b"abc" * 50)[:-5], ["truncated"]),
    "xz cut": ("f.xz", lzma.compress(b"abc" * 50)[:-5], ["truncated"]),
    "compressed twice": ("f.gz", gzip.compress(gzip.compress(b"a")), ["compressed twice"]),
    "tar: a hard link": ("f.tar", link(tarfile.LNKTYPE, "2.txt"), ["2.txt is a link to 1.txt", "--hard-dereference"]),
    "tar: a symbolic link": ("f.tar", link(tarfile.SYMTYPE, "2.json"), ["2.json is a link to 1.txt", "--dereference"]),
    "tar: damaged JSON": ("f.tar", tar_of(("1.json", b'{"text": "a"')), ["1.json", "not a valid JSON object"]),
    "tar: no text": ("f.tar", tar_of(("1.jpg", b"a")), [".jpg"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path):
    name, content, words = REFUSED[case]
    message = refusal(write(tmp_path, content, name))
    assert [word for word in words if word not in message] == [], message


def test_zst_headers_may_lie_anywhere(tmp_path):
    """Of a frame that begins at the end of what is read at a time, only the first bytes are known."""
    for size in (2**16, 2**16 - 3):  # a skippable frame fills what is read first, but for some bytes
        skipped = b"\x50\x2a\x4d\x18" + (size - 8).to_bytes(4, "little") + bytes(size - 8)
        assert "256 MiB" in refusal(write(tmp_path, skipped + zst(b"a", 28), "f.zst"))

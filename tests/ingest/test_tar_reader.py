"""WebDataset tars: samples and their texts, and what is refused."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest
from documents_of import documents_of, refusal, write


def tar_of(*members: tuple[str, bytes], format: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_texts_come_in_the_order_of_the_archive(tmp_path, format):
    content = tar_of(
        ("d/", b""),
        ("d/2.jpg", b"\xff\xd8\xff"),
        ("d/2.txt", b"two"),
        ("d/1.en.txt", b"one"),
        ("d/1.fr.TXT", b"un"),
        ("e/1.json", b'{"text": "json"}'),
        ("d/._1.txt", b"\0\0hidden"),
        ("f/1.json", b'{"text": "not this"}'),
        ("f/1.txt", b"but this"),
        ("f/1.meta.json", b"nor this"),
        ("x" * 90 + "/" + "y" * 90 + ".txt", b"long name"),
        ("é.txt", b""),
        ("g.txt", b"g" * 3_000_000),
        format=format,
    )
    expected = [b"two", b"one", b"un", b"json", b"but this", b"long name", b"g" * 3_000_000]
    assert documents_of(write(tmp_path, content)) == expected
    assert documents_of(write(tmp_path, gzip.compress(content), "a.bin")) == expected


def test_json_is_read_by_the_key(tmp_path):
    content = tar_of(("1.json", b'{"meta": {"body": "a"}}'), ("2.json", b'{"meta": {"body": null}}'), ("3.txt", b"c"))
    assert documents_of(write(tmp_path, content), text_key="meta.body") == [b"a", b"c"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("1.jpg", b"x"), ("1.cls", b"3"), ("2.txt", b"x")], [".jpg, .cls", "'1'"]),
        ([(".hidden", b"x")], ["without files of text"]),
        ([("1.json", b'{"caption": "x"}')], ["1.json", "caption", "--data.text_key"]),
        ([("1.json", b'{"text": "x"')], ["1.json", "not a valid JSON object"]),
        ([("1.txt", b"\0\1\2")], ["1.txt", "binary"]),
    ],
)
def test_what_is_no_text_is_one_sentence(tmp_path, members, words):
    message = refusal(write(tmp_path, tar_of(*members)))
    assert [word for word in words if word not in message] == []


def test_a_truncated_or_damaged_tar_is_one_sentence(tmp_path):
    whole = tar_of(("1.txt", b"a" * 700), ("2.jpg", b"b" * 700), ("2.txt", b"c" * 700), ("3.txt", b"d"))
    end = 9 * 512 + 2 * 512  # four headers, seven blocks of content
    assert whole[end : end + 1024] == bytes(1024)
    for length in [*range(600, end, 256), end]:
        assert "truncated" in refusal(write(tmp_path, whole[:length])), length
    for header in (3 * 512, 9 * 512):  # tarfile takes a damaged header for the end of the archive
        assert "damaged" in refusal(write(tmp_path, whole[:header] + b"\xee" * 512 + whole[header + 512 :]))


def test_two_tars_in_a_file_are_refused(tmp_path):
    assert "file of its own" in refusal(write(tmp_path, tar_of(("1.txt", b"a")) * 2))

"""Which files a user's paths and URLs name, on a file system here and on one in memory (fsspec's memory://)."""

import json
import os
import subprocess
import sys

import fsspec
import pytest

from lit_llm.core.errors import UserError
from lit_llm.ingest.open_source import open_source
from lit_llm.ingest.paths import MissingFiles, list_sources
from lit_llm.ingest.source import Source


@pytest.fixture
def memory():
    """Write files to memory://bucket."""
    fs = fsspec.filesystem("memory")

    def write(**contents: bytes):
        for name, content in contents.items():
            fs.pipe_file(f"/bucket/{name}", content)

    write(
        **{
            "a.txt": b"one",
            "b/c.txt": b"three",
            "b/d.jsonl": b"{}",
            "b/empty.txt": b"",
            ".hidden/e.txt": b"x",
            "b/.f.txt": b"x",
        }
    )
    yield write
    fs.rm("/bucket", recursive=True)


def paths(patterns):
    sources, problems = list_sources(patterns, flag="--data.paths")
    assert problems == []
    return [source.path for source in sources]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("memory://bucket/a.txt", ["a.txt"]),
        ("memory://bucket", ["a.txt", "b/c.txt", "b/d.jsonl"]),
        ("memory://bucket/b/", ["b/c.txt", "b/d.jsonl"]),
        ("memory://bucket/*.txt", ["a.txt"]),
        ("memory://bucket/**/*.txt", ["a.txt", "b/c.txt"]),
        (["memory://bucket/b/d.jsonl", "memory://bucket/**"], ["b/d.jsonl", "a.txt", "b/c.txt"]),
    ],
)
def test_a_url_is_a_file_a_folder_or_a_glob(memory, pattern, expected):
    assert paths(pattern) == [f"memory:///bucket/{name}" for name in expected]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            "memory://bucket/nothing.txt",
            "memory://bucket/nothing.txt cannot be read: it does not exist, or is private (--data.paths).",
        ),
        ("memory://bucket/*.zip", "No non-empty file matches memory://bucket/*.zip (--data.paths)."),
        ("memory://bucket/b/empty.txt", "memory://bucket/b/empty.txt is empty: give a file with content (--data.paths)."),
        (
            "magic://x/y",
            "magic://x/y: magic:// is not a known protocol; use s3://, gs://, hf:// or https:// (--data.paths).",
        ),
        (
            "zip://a.txt::memory://bucket/a.zip",
            "zip://a.txt::memory://bucket/a.zip is a chained URL: give the file itself (--data.paths).",
        ),
    ],
)
def test_a_url_that_names_nothing_is_one_sentence(memory, pattern, said):
    sources, problems = list_sources(pattern, flag="--data.paths")
    assert (sources, problems) == ([], [said])
    assert isinstance(problems[0], MissingFiles)  # `plan` goes on


def test_a_pattern_that_is_given_twice_is_refused_here_and_there(memory, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for pattern in (str(tmp_path / "a.txt"), "memory://bucket/a.txt"):
        problems = list_sources([pattern, pattern], flag="--data.paths")[1]
        assert problems == [f"{pattern} is given twice: remove it once (--data.paths)."]
    assert list_sources([], flag="--f")[1] == ["The list of files is empty: give a file, a folder or a glob (--f)."]


def test_of_a_saved_dataset_only_the_files_with_rows_are_read(tmp_path):
    saved = tmp_path / "saved"
    saved.mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "z.txt").write_text("z")
    for name in ("data-00000-of-00001.arrow", "dataset_info.json", "cache-1.arrow"):
        (saved / name).write_text("{}")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert paths(str(saved)) == [f"{saved}/data-00000-of-00001.arrow"]
    assert paths(str(tmp_path)) == [f"{tmp_path}/a.txt", f"{saved}/data-00000-of-00001.arrow", f"{tmp_path}/z.txt"]
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    sources, (said,) = list_sources(str(tmp_path), flag="--data.paths")
    assert sources == [] and said.startswith(f"{saved} is a dataset with the splits train, test: ")
    assert said.endswith(" (--data.paths).")


MISSING = """
import sys
from lit_llm.ingest.paths import list_sources
for url, module in (("s3://b/a", "fsspec"), ("s3://b/a", "s3fs"), ("gs://b/a", "gcsfs"),
                    ("https://h/a", "aiohttp"), ("sftp://h/a", "paramiko")):
    sys.modules[module] = None  # its import fails
    print(*list_sources(url, flag="--data.paths")[1])
    del sys.modules[module]
"""


def test_a_missing_package_is_named_with_its_command():
    said = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [
        "s3://b/a needs the package fsspec: pip install fsspec (--data.paths).",
        "s3://b/a needs the package s3fs: pip install s3fs (--data.paths).",
        "gs://b/a needs the package gcsfs: pip install gcsfs (--data.paths).",
        "https://h/a needs the package aiohttp: pip install aiohttp (--data.paths).",
        "sftp://h/a needs the package paramiko: pip install paramiko (--data.paths).",
    ]


def test_a_changed_file_is_not_read(memory, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    (here,) = list_sources(str(path), flag="--data.paths")[0]
    (there,) = list_sources("memory://bucket/a.txt", flag="--data.paths")[0]
    memory(**{"a.txt": b"longer"})
    os.utime(path, ns=(1, 1))  # as long as before
    for source in (here, there):
        with pytest.raises(UserError, match="has changed since this command started: start it again"):
            open_source(source)
    path.unlink()
    with pytest.raises(UserError, match=f"{path} cannot be read: No such file or directory"):
        open_source(here)


def test_passwords_and_signatures_of_urls_are_not_shown():
    source = Source("https://me:secret@host:8/folder/a.txt?signature=secret", 1, "v")
    assert source.name == "https://host:8/folder/a.txt?…"
    assert "secret" not in f"{source!r} {source}"
    for harmless in ("/folder/a@b?c", "s3://bucket/a@b?.txt", "http://[::1/a"):
        assert Source(harmless, 1, "v").name == harmless

"""Datasets by hub name, from a folder of this machine: `datasets` reads both the same way."""

import json
import os
import time

import pytest
from http_server import serving
from ports import free_port

from lit_llm.core.errors import UserError
from lit_llm.ingest.paths import list_sources
from lit_llm.ingest.readers import DocumentReader, ReadSettings

pytestmark = pytest.mark.slow  # `datasets` takes seconds to import
LOG_IN = "run `hf auth login`, or set HF_TOKEN"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with three shards of "train" and one of "test", as the working directory. Row 2 of each has no text."""
    monkeypatch.chdir(tmp_path)
    for name, shards in (("train", 3), ("test", 1)):
        for shard in range(shards):
            rows = [{"text": text and f"{name} {shard} {text}", "n": {"m": text}} for text in ("ä", "b", None, "", "c\n")]
            path = tmp_path / "data" / f"{name}-{shard:05d}-of-{shards:05d}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def listed(pattern):
    sources, problems = list_sources(pattern, flag="--data.paths")
    assert problems == []
    return sources


def read(source, text_key="text"):
    with DocumentReader(source, ReadSettings(text_key=text_key)) as reader:
        return list(reader)


def problem(pattern):
    sources, (said,) = list_sources(pattern, flag="--data.paths")
    assert sources == []
    return said


def test_each_shard_is_a_source_and_gives_its_documents():
    sources = listed("hub:./data")
    assert [source.path for source in sources] == [f"hub:./data?split=train#shard={shard}" for shard in range(3)]
    assert [source.is_local for source in sources] == [False] * 3
    for shard, source in enumerate(sources):
        pieces = read(source)
        assert [piece.text.decode() for piece in pieces] == [f"train {shard} {text}" for text in ("ä", "b", "c\n")]
        assert all(piece.last for piece in pieces)
        with DocumentReader(source, ReadSettings()) as reader:
            assert (len(list(reader)), reader.skipped, reader.position, reader.format) == (3, 2, 0, "hub")
    (test,) = listed("hub:./data?split=test")
    assert [piece.text for piece in read(test, "n.m")] == ["ä".encode(), b"b", b"c\n"]


def test_the_version_changes_with_a_file_of_the_split_and_with_no_other(folder):
    train, test = listed("hub:./data")[0], listed("hub:./data?split=test")[0]
    os.utime(folder / "train-00002-of-00003.jsonl", (1, 1))
    assert listed("hub:./data?split=test") == [test]
    assert listed("hub:./data")[0].version != train.version
    with pytest.raises(UserError, match="has changed since this command started"):
        read(train)


def test_what_is_missing_is_one_sentence_with_what_is_there(folder):
    said = "has no split 'validation': give ?split= one of train, test (--data.paths)."
    assert problem("hub:./data?split=validation") == f"hub:./data?split=validation {said}"
    said = "hub:./data?name=big&split=train has no configuration 'big': give ?name= one of default (--data.paths)."
    assert problem("hub:./data?name=big") == said
    (folder.parent / "empty").mkdir()
    said = "hub:./empty?split=train has no file that the package datasets reads: check the folder (--data.paths)."
    assert problem("hub:./empty") == said
    assert problem("hub:./nothing") == "hub:./nothing is no folder: check its path (--data.paths)."


@pytest.mark.parametrize(
    ("text_key", "said"),
    [
        ("body", r"^hub:./data\?split=train#shard=0 has no key 'body', it has text, n: name the key"),
        ("n.x", r"^Row 1 of hub:./data\?split=train#shard=0 has no key 'n.x', it has n.m: name the key"),
        ("n", r"^Row 1 of hub:.* has an object under 'n', but the text must be a string"),
    ],
)
def test_a_wrong_key_is_one_sentence(text_key, said):
    with pytest.raises(UserError, match=said):
        read(listed("hub:./data")[0], text_key)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("hub:a/b?spilt=test", "has the unknown option 'spilt'"),
        ("hub:?split=test", "names no dataset"),
        ("hub:./data?revision=main", "is a folder, which has no revisions"),
    ],
)
def test_a_mistyped_name_is_one_sentence(pattern, reason):
    assert problem(pattern).startswith(f"{pattern} {reason}: ")


def test_a_hub_that_does_not_answer_or_refuses_is_one_sentence(monkeypatch):
    from huggingface_hub import constants

    started = time.monotonic()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    said = "the server cannot be reached or does not answer; check the address and the network (--data.paths)."
    assert problem("hub:owner/name") == f"hub:owner/name?split=train cannot be read: {said}"
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"{server}/status/403")
        said = f"access is denied (status 403); {LOG_IN} (--data.paths)."
        assert problem("hub:owner/name") == f"hub:owner/name?split=train cannot be read: {said}"
    assert time.monotonic() - started < 60

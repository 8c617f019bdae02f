"""meta.json: what is written is read back, and a damaged one is one sentence."""

import json

import pytest

from lit_llm.core.errors import UserError
from lit_llm.ingest.shard_manifest import Manifest, ShardInfo, SplitInfo

SHARDS = (ShardInfo("train_000000.bin", 4, 1, 255, "ab"), ShardInfo("train_000001.bin", 3, 1, 256, "cd"))
MANIFEST = Manifest("bytes", 257, None, 256, {"train": SplitInfo(2, 5, 7, 0, 0, "ef", SHARDS)})


def test_a_manifest_is_read_back(tmp_path):
    assert Manifest.read(tmp_path) is None
    MANIFEST.write(tmp_path)
    assert Manifest.read(tmp_path) == MANIFEST
    content = json.loads((tmp_path / "meta.json").read_text())
    assert (content["format"], content["bos_id"], content["eos_id"]) == (3, None, 256)
    assert content["splits"]["train"]["shards"][1] == {
        "file": "train_000001.bin",
        "tokens": 3,
        "documents": 1,
        "max_id": 256,
        "blake2b": "cd",
        "mask_blake2b": None,
        "docs_blake2b": None,
    }


def test_the_old_layout_and_other_projects_files_are_no_manifest(tmp_path):
    for content in ({"tokenizer": "bytes", "vocab_size": 257, "splits": {"train": {"tokens": 7}}}, {"itos": []}, [1]):
        (tmp_path / "meta.json").write_text(json.dumps(content))
        assert Manifest.read(tmp_path) is None


def changed(content, *keys, value):
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("format",), 4, "has format 4, but this version reads format 3: prepare the data again, or update lit_llm."),
        (("vocab_size",), "257", "is damaged, vocab_size is '257': restore it, or prepare the data again"),
        (("splits", "train", "shards", 0), "x", "shards is 'x'"),
    ],
)
def test_a_damaged_value_is_named(tmp_path, keys, value, words):
    MANIFEST.write(tmp_path)
    content = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(changed(content, *keys, value=value))
    with pytest.raises(UserError, match=words) as error:
        Manifest.read(tmp_path)
    assert str(tmp_path / "meta.json") in str(error.value) and "\n" not in str(error.value)

"""TokenShards with the manifest that `prepare` writes: what it takes from it, and what contradicts it."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest
from prepared import SPLITS, prepared

from lit_llm.core.errors import UserError
from lit_llm.data import BPE, Bytes, Characters, TokenizerJSON, TokenShards


def opened(**settings):
    data = TokenShards(block_size=8, global_batch_size=4, **settings)
    data.setup("fit")
    return data


def problems(**settings):
    return TokenShards(block_size=8, global_batch_size=4, **settings).problems()


@pytest.fixture
def folder(tmp_path):
    return prepared(tmp_path / "shards")


def patterns(folder):
    return {name: f"{folder}/{name}_*.bin" for name in ("train", "val", "test")}


def test_a_folder_is_enough(folder):
    data = opened(path=str(folder))
    assert (data.train_tokens, data.val_tokens, data.vocab_size, data.eos_id, data.bos_id) == (200, 30, 257, 256, None)
    assert data.tokenizer.decode([72, 105]) == "Hi"
    np.testing.assert_array_equal(data.corpus.streams["train"].read(0, 200), SPLITS["train"])
    assert [path.name for path in data.source_files()] == [
        *(f"train_{i:06d}.bin" for i in range(4)),
        "val_000000.bin",
        "test_000000.bin",
    ]


def test_no_shard_is_opened_to_start_and_nothing_is_looked_up_twice(folder, monkeypatch):
    seen = {"open": [], "stat": []}

    def watched(name):
        call = getattr(os, name)

        def wrapper(path, *arguments, **options):
            if str(path).endswith(".bin"):
                seen[name].append(os.path.basename(path))
            return call(path, *arguments, **options)

        return wrapper

    monkeypatch.setattr(os, "open", watched("open"))
    monkeypatch.setattr(os, "stat", watched("stat"))
    data = TokenShards(block_size=8, global_batch_size=4, path=str(folder))
    assert data.problems() == [] and data.known_vocab_size == 257
    data.setup("fit")
    assert (seen["open"], len(seen["stat"]), len(set(seen["stat"]))) == ([], 12, 6)  # sizes, then states
    next(iter(data.train_dataloader()))
    assert 1 <= len(seen["open"]) <= 4


def test_the_fingerprint_is_that_of_the_tokens_with_and_without_a_manifest(tmp_path):
    first, other = prepared(tmp_path / "a"), prepared(tmp_path / "b", shard_tokens=33)
    (other / "meta.json").unlink()
    parts = []
    for name, tokens in SPLITS.items():
        digest = hashlib.blake2b(np.asarray(tokens).astype("<u4").tobytes(), digest_size=16).hexdigest()
        parts.append(f"{name}={len(tokens)}:{digest}")
    expected = hashlib.sha256(" ".join(parts).encode())
    fingerprints = {
        opened(path=str(first)).opened.fingerprint(),
        opened(vocab_size=257, **patterns(other)).opened.fingerprint(),
    }
    assert fingerprints == {expected.hexdigest()[:32]}


def test_unknown_characters_have_the_bytes_that_were_counted_over_the_whole_split(tmp_path):
    characters = Characters(vocab_size=100)
    characters.train(["some text to learn from"])
    folder = prepared(tmp_path / "shards", {name: ids % 10 for name, ids in SPLITS.items()}, tokenizer=characters)
    whole = opened(path=str(folder))
    assert [whole.corpus.token_bytes_of(name)[0] for name in SPLITS] == [2.5, 2.5, 2.5]  # 10 bytes of 4 tokens
    part = opened(train=f"{folder}/train_000000.bin", val=f"{folder}/val_*.bin")
    assert (part.corpus.token_bytes_of("train")[0], part.corpus.token_bytes_of("val")[0]) == (3, 2.5)
    (tmp_path / "same").mkdir()
    characters.save(tmp_path / "same")
    assert opened(path=str(folder), tokenizer=TokenizerJSON(str(tmp_path / "same"))).vocab_size == characters.vocab_size
    with pytest.raises(UserError, match=r"shards was prepared with another tokenizer.*--data\.tokenizer"):
        opened(path=str(folder), tokenizer=Bytes())  # ids below 257, and no other sign that they mean other text


def test_an_id_outside_a_smaller_vocabulary_is_found_without_reading(folder):
    with pytest.raises(UserError, match=r"train_00000\d\.bin holds token id 199, but the vocabulary has 199 ids"):
        opened(path=str(folder), vocab_size=199)


def test_folders_without_what_training_needs_are_one_sentence_each(tmp_path):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert problems(path=str(nothing)) == [
        f"{nothing} has no meta.json that lists its shards: prepare the data again, or give the files, such as "
        f"--data.train '{nothing}/train_*.bin' --data.val '{nothing}/val_*.bin'."
    ]
    assert problems(path=str(tmp_path / "gone")) == [
        f"{tmp_path}/gone is not found: give a folder that prepare wrote (--data.path)."
    ]
    (tmp_path / "file").touch()
    assert "is not a folder" in problems(path=str(tmp_path / "file"))[0]
    only = prepared(tmp_path / "only", {"train": SPLITS["train"]})
    assert problems(path=str(only)) == [f"{only} has no val shards: prepare the data again with val text (--data.path)."]
    (only / "meta.json").write_text("{")
    for settings in ({"path": str(only)}, {"train": f"{only}/train_*.bin", "val": f"{only}/train_*.bin"}):
        assert "meta.json is damaged, it is not JSON" in problems(**settings)[0]


def test_shards_that_are_not_those_of_the_manifest_are_named(folder):
    os.truncate(folder / "train_000001.bin", 1100)
    (folder / "val_000000.bin").unlink()
    truncated, missing = problems(path=str(folder))
    assert "train_000001.bin is truncated: meta.json says 64 tokens = 1152 bytes, but it has 1100." in truncated
    assert missing == f"Token shard not found: {folder}/val_000000.bin (--data.path)."


def test_splits_made_with_two_tokenizers_are_refused(tmp_path, folder):
    other = prepared(tmp_path / "other", identity="words")
    (said,) = problems(train=f"{folder}/train_*.bin", val=f"{other}/val_*.bin")
    assert said.startswith(f"The shards in {folder} and {other} were made with different tokenizers")
    assert problems(train=f"{folder}/train_*.bin", val=f"{prepared(tmp_path / 'same')}/val_*.bin") == []


# -- ids around documents -----------------------------------------------------------------------------------------------


def bare(folder):
    (folder / "meta.json").unlink()
    return {name: f"{folder}/{name}_*.bin" for name in ("train", "val")}


def test_ids_around_documents_come_from_the_settings_the_manifest_or_the_tokenizer(tmp_path):
    opens = prepared(tmp_path / "a", vocab_size=50257, bos_id=50256, eos_id=None)
    data = opened(path=str(opens))
    assert (data.bos_id, data.eos_id) == (50256, 256)  # the end of a document is the tokenizer's
    files = bare(opens)
    assert (opened(**files).bos_id, opened(**files).eos_id) == (None, None)
    data = opened(**files, bos_id=50256, eos_id=7)  # as for llm.c's FineWeb
    assert (data.bos_id, data.eos_id) == (50256, 7)
    assert opened(**files, tokenizer=Bytes()).eos_id == 256


def test_ids_that_contradict_each_other_or_the_vocabulary_are_refused(tmp_path, folder):
    assert problems(path=str(folder), bos_id=257, eos_id=-1) == [
        "bos_id is 257, but the vocabulary has 257 ids (--data.bos_id).",
        "eos_id is -1, but the vocabulary has 257 ids (--data.eos_id).",
    ]
    assert problems(path=str(folder), eos_id=256, bos_id=5) == [
        "bos_id is 5, but meta.json of the shards says None: remove --data.bos_id."
    ]
    bpe = BPE(vocab_size=300)
    bpe.train(["some text to learn from"] * 9)
    bpe.save(tmp_path)
    tokenizer = TokenizerJSON(str(tmp_path))
    files = bare(folder)
    end = tokenizer.eos_id
    assert problems(**files, vocab_size=300, tokenizer=tokenizer, eos_id=end) == []
    assert problems(**files, vocab_size=300, tokenizer=tokenizer, bos_id=end) == [
        f"bos_id is {end}, but that of the tokenizer is None: remove --data.bos_id, or set --data.tokenizer.bos_token "
        "'<|endoftext|>'."
    ]
    assert (
        problems(**files, vocab_size=300, tokenizer=TokenizerJSON(str(tmp_path), bos_token="<|endoftext|>"), bos_id=end) == []
    )

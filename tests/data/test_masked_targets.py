"""Masks beside shards: which tokens of a block are targets, in training and in held-out text."""

from __future__ import annotations

import numpy as np
import pytest

from lit_llm.data import ShardWriter, TokenShards, load_tokenizer
from lit_llm.data.blocks import HeldOutBlocks, TrainBlocks
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shard_manifest import Manifest, SplitInfo
from lit_llm.tokenizers import Bytes

# A prompt of three tokens and an answer of two, with its end of turn.
TOKENS = [10, 11, 12, 20, 21, 256] * 5
MASK = [0, 0, 0, 1, 1, 1] * 5


def folder_with_masks(folder, *, mask=MASK, shard_tokens=7):
    folder.mkdir()
    splits = {}
    for name in ("train", "val"):
        with ShardWriter(folder, name, vocab_size=257, shard_tokens=shard_tokens, masked=True) as writer:
            for start in range(0, len(TOKENS), 6):
                writer.write(np.array(TOKENS[start : start + 6]), np.array(mask[start : start + 6], np.uint8))
                writer.end_document()
        splits[name] = SplitInfo(
            5, 20, 30, 0, 0, writer.tokens_blake2b, tuple(writer.shards), writer.targets, writer.mask_blake2b
        )
    Bytes().save(folder)
    Manifest(load_tokenizer(folder).identity(), 257, None, None, splits).write(folder)
    return folder


@pytest.mark.parametrize("kind", [TrainBlocks, HeldOutBlocks])
def test_a_target_is_learned_if_its_own_byte_of_the_mask_is_one(tmp_path, kind):
    # Shifted by one in either direction, the first token of an answer is not learned, or the last one of a prompt is.
    folder = folder_with_masks(tmp_path / "shards")
    blocks = kind(TokenStream(sorted(folder.glob("train_*.bin"))), block_size=8, vocab_size=257)
    rows = blocks.rows(np.arange(len(blocks)))
    for block in range(len(blocks)):
        for t in range(8):
            place = 8 * block + t + 1  # the target of input t
            expected = TOKENS[place] if place < 30 and MASK[place] else -100
            assert rows.targets[block, t] == expected
            assert rows.input_ids[block, t] == (TOKENS[place - 1] if place < 30 else rows.input_ids[block, t])


@pytest.mark.parametrize(("size", "masked", "cut"), [(4, True, 2), (5, True, 1), (8, True, 0), (4, False, 0)])
def test_conversations_that_are_longer_than_a_block_are_counted(tmp_path, size, masked, cut):
    for name in ("train", "val"):
        with ShardWriter(tmp_path, name, vocab_size=257, shard_tokens=100, masked=masked) as writer:
            for tokens in (3, 7, 6, 4, 5):  # a document of n tokens has n - 1 pairs
                writer.write(np.arange(tokens), *([np.ones(tokens, np.uint8)] if masked else []))
                writer.end_document()
    files = {name: str(tmp_path / f"{name}_*.bin") for name in ("train", "val")}
    data = TokenShards(**files, vocab_size=257, block_size=size, global_batch_size=2, packing="best_fit")
    data.setup("fit")
    said = f"{cut} of 5 training conversations are longer than data.block_size {size} and are cut"
    assert data.opened.cut_conversations().startswith(said) if cut else data.opened.cut_conversations() == ""


def test_a_run_knows_that_targets_are_ignored_and_notices_another_mask(tmp_path):
    fingerprints = []
    for number, mask in enumerate((MASK, [0, 0, 1] * 10)):
        data = TokenShards(path=str(folder_with_masks(tmp_path / str(number), mask=mask)), block_size=4, global_batch_size=2)
        data.setup("fit")
        assert not data.every_target_counts
        fingerprints.append(data.opened.fingerprint())
    assert fingerprints[0] != fingerprints[1]
    same = TokenShards(path=str(folder_with_masks(tmp_path / "2", shard_tokens=30)), block_size=4, global_batch_size=2)
    same.setup("fit")
    assert same.opened.fingerprint() == fingerprints[0]  # whatever the size of shards
    manifest = Manifest.read(tmp_path / "0")
    assert (manifest.splits["train"].targets, manifest.splits["train"].tokens) == (15, 30)
    docs = tmp_path / "2" / "val_000000.docs"
    docs.write_bytes(docs.read_bytes()[:-8])
    cut = TokenShards(path=str(tmp_path / "2"), block_size=4, global_batch_size=2)
    assert any("val_000000.docs has 32 bytes, but meta.json says 5 documents" in problem for problem in cut.problems())
    (tmp_path / "0" / "val_000001.mask").unlink()
    data = TokenShards(path=str(tmp_path / "0"), block_size=4, global_batch_size=2)
    assert any("val_000001.mask is missing" in problem for problem in data.problems())

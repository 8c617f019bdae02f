"""What gzip and xz reach on the evaluated text, against the modules gzip and lzma on the bytes of the files."""

from __future__ import annotations

import gzip
import lzma
from types import SimpleNamespace

import numpy as np
import pytest

from lit_llm.data import BPE, Bytes, Characters, Mixture, MixturePhase, MixtureSource, ShardWriter, TextFiles, TokenShards
from lit_llm.data.batches import HeldOutOrder
from lit_llm.training import compressors as module
from lit_llm.training.compressors import compressors

TEXT = "".join(f"Zeile {i} – größer als {i * i % 977}\n" for i in range(600))


def bits(text: bytes) -> dict[str, float]:
    sizes = {"gzip": len(gzip.compress(text, 9)), "xz": len(lzma.compress(text, preset=9))}
    return {f"val/{name}_bits_per_byte": pytest.approx(8 * size / len(text)) for name, size in sizes.items()}


def text_data(folder, held=TEXT[5000:], **settings):
    for name, text in {"train": TEXT, "val": held}.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    files = {name: str(folder / f"{name}.txt") for name in ("train", "val")}
    data = TextFiles(**files, **{"block_size": 16, "micro_batch_size": 2, "cache_dir": str(folder / "cache")} | settings)
    data.prepare_data()
    data.setup()
    return data


def found(data, *, batches=2**40, ranks=1):
    """As rank 0 of an evaluation of so many batches on each rank."""
    blocks = data.val_dataloader().dataset
    loader = SimpleNamespace(dataset=blocks, sampler=HeldOutOrder(blocks, micro_batch_size=2, rank=0, world_size=ranks))
    return compressors(SimpleNamespace(testing=False, val_dataloaders=loader, num_val_batches=[batches]), data, "val")


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE(300)])
def test_they_are_those_of_all_bytes_but_the_first_token_whatever_the_ranks(tmp_path, tokenizer):
    data = text_data(tmp_path, tokenizer=tokenizer)
    first = data.tokenizer.decode(data.corpus.streams["val"].read(0, 1)).encode()
    held = TEXT[5000:].encode()
    for ranks in (1, 3):
        row, sentence = found(data, ranks=ranks)
        assert row == bits(held.removeprefix(first)) and f" {len(held) - len(first):,} bytes" in sentence


def test_with_a_limit_they_are_those_of_the_batches_that_are_read(tmp_path):
    data, held = text_data(tmp_path), TEXT[5000:].encode()
    for ranks in (1, 3):
        text = held[1 : 1 + ranks * 5 * 2 * 16].decode(errors="replace").encode()  # a character may be cut at the end
        assert found(data, batches=5, ranks=ranks)[0] == bits(text)


def test_of_a_long_text_they_are_those_of_parts_at_equal_distances(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_TOKENS", 64 * 16)
    text = TEXT[5000:].encode("ascii", "replace").decode()  # parts begin and end inside characters, which is not the claim
    data, held = text_data(tmp_path, text), text.encode()
    blocks = -(-len(held) // 16)  # the end of the document is a target, too
    sizes = [blocks // 16 + (i < blocks % 16) for i in range(16)]
    starts = [16 * sum(sizes[:i]) for i in range(16)]
    row, sentence = found(data)
    monkeypatch.undo()
    parts = b"".join(held[start + 1 : start + 1 + 4 * 16] for start in starts)
    assert sizes[0] > 4 and row == bits(parts) and "1,024 bytes" in sentence and "sample in 16 parts" in sentence


def test_the_text_of_each_source_is_compressed_in_one_piece(tmp_path):
    texts, sources = {"a": TEXT[:900].encode(), "b": TEXT[5000:5700].encode()}, {}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        Bytes().save(tmp_path / name)
        for split in ("train", "val"):
            with ShardWriter(tmp_path / name, split, vocab_size=257, shard_tokens=1000) as writer:
                writer.write(np.frombuffer(text, np.uint8))
        files = {split: f"{tmp_path}/{name}/{split}_*.bin" for split in ("train", "val")}
        sources[name] = MixtureSource(**files)
    phases = [MixturePhase({"a": 0.5, "b": 0.5}, 1.0)]
    data = Mixture(sources=sources, phases=phases, block_size=16, micro_batch_size=2, vocab_size=257, tokenizer=Bytes())
    data.find_run(max_steps=10, max_epochs=-1, saved=None)
    data.setup()
    assert found(data)[0] == bits(texts["a"][1:] + texts["b"][1:])


def test_where_they_mean_nothing_the_reason_is_said(tmp_path):
    text = np.frombuffer(TEXT[:600].encode(), np.uint8)
    for split in ("train", "val"):
        with ShardWriter(tmp_path, split, vocab_size=257, shard_tokens=1000, masked=True) as writer:
            writer.write(text, (np.arange(len(text)) // 8 % 2).astype(np.uint8))
    files = {split: str(tmp_path / f"{split}_*.bin") for split in ("train", "val")}
    of_shards = {"block_size": 16, "micro_batch_size": 2, "vocab_size": 257}
    (tmp_path / "letters").mkdir()
    cases = {
        "--data.tokenizer": TokenShards(**files, **of_shards),
        "only a part of the text is predicted": TokenShards(**files, **of_shards, tokenizer=Bytes()),
        "the tokenizer gives": text_data(tmp_path / "letters", tokenizer=Characters(5)),  # all else is unknown
    }
    for reason, data in cases.items():
        data.setup()
        row, sentence = found(data)
        assert row == {} and reason in sentence
    own = SimpleNamespace(testing=False, val_dataloaders=[[]], num_val_batches=[1])
    assert compressors(own, SimpleNamespace(), "val")[0] == {}

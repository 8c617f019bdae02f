"""Bits per byte of a text with characters outside the vocabulary, against bytes counted by hand."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from ingest.tokenizer_kinds import KINDS, write
from lightning.pytorch import Trainer

from lit_llm.data import Corpus, TextFiles, TokenDataModule
from lit_llm.data.shard_splits import text_sizes
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shard_manifest import SplitInfo
from lit_llm.ingest.shards import ShardWriter
from lit_llm.models.gpt import GPTConfig
from lit_llm.tokenizers import Characters, PieceEncoder, TokenizerJSON, choose_encoder
from lit_llm.training.language_model import LanguageModel

# Known: a, b and the newline. Bytes after the first character, which is no target:
TEXTS = {
    "train": "ab\n" * 20,
    "val": "ab\nxxé€😀aaa",  # 2 known, then 1 + 1 + 2 + 3 + 4, then 3 known: 16 bytes in 10 targets
    "test": "abéa\N{REPLACEMENT CHARACTER}ß\n",  # 1, then 2, 1, 3, 2 and 1: 10 bytes in 6 targets
}


class Letters(TokenDataModule):
    def __init__(self, folder, **kwargs):
        super().__init__(micro_batch_size=2, global_batch_size=2, block_size=4, **kwargs)
        self.folder = folder

    def source_problems(self):
        return []

    def open_corpus(self):
        tokenizer = Characters(5)
        tokenizer.train([TEXTS["train"]])
        streams, splits = {}, {}
        for name, text in TEXTS.items():
            encoder = PieceEncoder(tokenizer, choose_encoder(tokenizer, []))
            half = len(text) // 2  # in two pieces
            pieces = encoder.encode(text[:half].encode()), encoder.encode(text[half:].encode(), continues=True)
            with ShardWriter(self.folder, name, vocab_size=tokenizer.vocab_size, shard_tokens=100) as writer:
                writer.write(np.concatenate(pieces))
            counts = {"documents": 1, "bytes": len(text.encode()), "tokens": writer.tokens}
            unknown = {"unknown_tokens": encoder.unknown_tokens, "token_bytes": encoder.token_bytes}
            splits[name] = SplitInfo(**counts, **unknown, tokens_blake2b="", shards=())
            streams[name] = TokenStream(sorted(self.folder.glob(f"{name}_*.bin")))
        return Corpus(streams, tokenizer.vocab_size, tokenizer, text_sizes([splits]))


def test_they_are_counted_when_text_is_prepared(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    files = {name: str(tmp_path / f"{name}.txt") for name in TEXTS}
    data = TextFiles(**files, tokenizer=Characters(5), block_size=4, global_batch_size=2, cache_dir=str(tmp_path / "cache"))
    data.prepare_data()
    data.setup("validate")
    assert data.tokenizer.unknown_id == 0
    assert data.token_bytes_of("val")[0] == (1 + 1 + 2 + 3 + 4) / 5
    assert data.token_bytes_of("test")[0] == (2 + 3 + 2) / 3
    assert data.token_bytes_of("train").tolist() == data.token_bytes.tolist()  # none


def test_unknown_characters_count_with_their_own_bytes(tmp_path):
    data = Letters(tmp_path)
    module = LanguageModel(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=4), partial(torch.optim.SGD, lr=0.1))
    trainer = Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    results = {}
    for name, evaluate in (("val", trainer.validate), ("test", trainer.test)):
        metrics = evaluate(module, datamodule=data, verbose=False)[0]
        results[name] = metrics[f"{name}/bits_per_byte"] * math.log(2) / metrics[f"{name}/loss"]  # targets per byte
    assert results == {"val": pytest.approx(10 / 16, rel=1e-6), "test": pytest.approx(6 / 10, rel=1e-6)}


@pytest.mark.parametrize("kind", [*KINDS, "fallback", "nfkc"])
def test_the_bytes_of_held_out_tokens_are_those_of_its_text(kind, tmp_path):
    texts = [
        "short",
        "two words here",
        "ﬁrst café ½ ①",
        "日本語 \u3000 x",
        "a\tb  c\n",
    ] * 3
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "val.jsonl").write_text(content)
    (tmp_path / "train.txt").write_text("words to train on\n" * 20)
    write("llama2" if kind == "fallback" else "qwen" if kind == "nfkc" else kind, tmp_path / "tokenizer", vocab_size=700)
    file = tmp_path / "tokenizer/tokenizer.json"
    saved = json.loads(file.read_text())
    if kind == "fallback":  # without a token for the space, it is three bytes
        saved["model"]["vocab"] = {name.replace("▁", "Ġ"): i for name, i in saved["model"]["vocab"].items()}
        saved["model"]["merges"] = []
    elif kind == "nfkc":
        saved["normalizer"] = {"type": "NFKC"}
    file.write_text(json.dumps(saved))
    given = {"train": str(tmp_path / "train.txt"), "val": str(tmp_path / "val.jsonl"), "cache_dir": str(tmp_path / "cache")}
    data = TextFiles(**given, tokenizer=TokenizerJSON(str(file)), block_size=4, global_batch_size=2)
    data.prepare_data()
    data.setup("validate")
    stream = data.corpus.streams["val"]
    ids = torch.from_numpy(stream.read(0, len(stream)).astype(np.int64))
    expected = sum(len(text.encode()) for text in texts)
    assert float(data.token_bytes_of("val")[ids].sum()) == pytest.approx(expected, rel=1e-12)  # a sum of floats
    if kind not in ("gpt2", "llama3", "qwen"):
        assert data.token_bytes[ids].sum() != expected, "the table alone does not know"

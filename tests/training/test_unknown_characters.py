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

from lit_llm.data import TextFiles
from lit_llm.models.gpt import GPTConfig
from lit_llm.tokenizers import Characters, TokenizerJSON
from lit_llm.training.language_model import LanguageModel

# Known: a, b and the newline. Bytes after the first character, which is no target:
TEXTS = {
    "train": "ab\n" * 20,
    "val": "ab\nxxé€😀aaa",  # 2 known, then 1 + 1 + 2 + 3 + 4, then 3 known: 16 bytes in 10 targets
    "test": "abéa\N{REPLACEMENT CHARACTER}ß\n",  # 1, then 2, 1, 3, 2 and 1: 10 bytes in 6 targets
}


def test_unknown_characters_count_with_their_own_bytes(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    files = {name: str(tmp_path / f"{name}.txt") for name in TEXTS}
    data = TextFiles(**files, tokenizer=Characters(5), block_size=4, global_batch_size=2, cache_dir=str(tmp_path / "cache"))
    module = LanguageModel(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=4), partial(torch.optim.SGD, lr=0.1))
    trainer = Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    results = {}
    for name, evaluate in (("val", trainer.validate), ("test", trainer.test)):
        metrics = evaluate(module, datamodule=data, verbose=False)[0]
        results[name] = metrics[f"{name}/bits_per_byte"] * math.log(2) / metrics[f"{name}/loss"]  # targets per byte
    assert results == {"val": pytest.approx(11 / 16, rel=1e-6), "test": pytest.approx(7 / 10, rel=1e-6)}
    assert data.corpus.token_bytes_of("train").tolist() == data.token_bytes.tolist()  # none is unknown


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
    assert float(data.corpus.token_bytes_of("val")[ids].sum()) == pytest.approx(expected, rel=1e-12)  # a sum of floats
    if kind not in ("gpt2", "llama3", "qwen"):
        assert data.token_bytes[ids].sum() != expected, "the table alone does not know"

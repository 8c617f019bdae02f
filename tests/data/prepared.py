"""A folder as `prepare` writes it: made here, or by a data module."""

from __future__ import annotations

import numpy as np

from lit_llm.core.disk import delete
from lit_llm.data import Bytes
from lit_llm.ingest.shard_manifest import Manifest, SplitInfo
from lit_llm.ingest.shards import ShardWriter
from lit_llm.ingest.token_parts import PARTS

VOCABULARY = Bytes().vocab_size  # 257: 256 bytes and the end of a document
SPLITS = {"train": np.arange(200) % 250, "val": np.arange(100, 130), "test": np.arange(40)}


def prepared(folder, splits=SPLITS, *, shard_tokens=64, tokenizer=None, identity="bytes", vocab_size=VOCABULARY, **ids):
    """A folder as `prepare` writes it."""
    folder.mkdir(exist_ok=True)
    written = {}
    for name, tokens in splits.items():
        with ShardWriter(folder, name, vocab_size=vocab_size, shard_tokens=shard_tokens) as writer:
            writer.write(np.asarray(tokens))
            writer.end_document()
        shards = tuple(writer.shards)
        unknown = (4, writer.tokens - 10) if getattr(tokenizer, "unknown_id", None) is not None else (0, writer.tokens)
        written[name] = SplitInfo(1, writer.tokens, writer.tokens, *unknown, writer.tokens_blake2b, shards)
    ids = {"bos_id": None, "eos_id": 256} | ids
    Manifest(identity, vocab_size, **ids, splits=written).write(folder)
    (tokenizer or Bytes()).save(folder)
    return folder


def prepare(data, out, *, shard_tokens=10**8, workers=0):
    """Tokenise the text of a data module, and leave nothing that only an interrupted call would need."""
    data.raise_problems()
    out.mkdir()
    summary = data.tokenise(out, shard_tokens=shard_tokens, workers=workers)
    delete(out / PARTS)
    return summary

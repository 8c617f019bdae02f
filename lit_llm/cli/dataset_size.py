"""What is known of a data module's corpus for next to nothing: shard headers, file sizes, a cache that is there. Never a
token.
"""

from __future__ import annotations

import json
from typing import Any

from lit_llm.data.build import META_FILE
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.shards import TokenStream
from lit_llm.data.text import TextDataModule
from lit_llm.data.token_shards import TokenShards
from lit_llm.data.tokenizer import Bytes, Characters, Learned
from lit_llm.plan.settings import DataFacts

BYTES_PER_TOKEN = 3.5
"""Of text under a BPE that has not been run: an assumption (2,048 ids on Python sources make 3.0, GPT-2's on English 4.5)."""


def data_facts(data: Any) -> tuple[DataFacts, int | None]:
    """Tokens there are, and the vocabulary's size or None. Call it only where `data.problems()` is empty."""
    if isinstance(data, TokenShards):
        streams = {name: TokenStream(data._files(name)[0], headerless=data.headerless) for name in ("train", "val")}
        itemsize = streams["train"]._layouts[0][0].itemsize
        return DataFacts(len(streams["train"]), len(streams["val"]), "counted in shard headers", itemsize), data._vocab_size
    if not isinstance(data, TextDataModule):
        unopened = isinstance(data, TokenDataModule) and data._corpus is None  # a class of the user's: only opening it tells
        return DataFacts(), None if unopened else getattr(data, "vocab_size", None)
    folder = data._cache_folder()
    if folder.exists():
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        counts = {name: split["tokens"] for name, split in meta["splits"].items()}
        size = 2 if meta["vocab_size"] <= 2**16 else 4
        return DataFacts(counts["train"], counts["val"], "counted when it was tokenised", size), meta["vocab_size"]
    documents = data.documents()
    sizes = {name: sum(document.size for document in split) for name, split in documents.items()}
    tokenizer = data.source_tokenizer
    if isinstance(tokenizer, Bytes):
        counts = {name: size + len(documents[name]) for name, size in sizes.items()}
        return DataFacts(counts["train"], counts["val"], "counted: one per byte and document"), tokenizer.vocab_size
    per_token = 1.0 if isinstance(tokenizer, Characters) else BYTES_PER_TOKEN
    counts = {name: round(size / per_token) + len(documents[name]) for name, size in sizes.items()}
    vocab_size = tokenizer.requested_size if isinstance(tokenizer, Learned) else tokenizer.vocab_size
    origin = f"estimated from {sum(sizes.values()):,} bytes at {per_token:g} a token"
    return DataFacts(counts["train"], counts["val"], origin, 2 if vocab_size <= 2**16 else 4), vocab_size

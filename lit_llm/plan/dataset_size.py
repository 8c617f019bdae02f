"""The number of tokens of a dataset, from shard headers, file sizes or a token cache's manifest, without reading tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.mixture import Mixture
from lit_llm.data.pack_plan import planned, report
from lit_llm.data.packing import Counts
from lit_llm.data.text import TextDataModule
from lit_llm.data.text_files import GivenFiles
from lit_llm.data.token_shards import TokenShards
from lit_llm.ingest.inputs import Input
from lit_llm.plan.planned_run import DataFacts
from lit_llm.tokenizers import Bytes, Characters, Learned

BYTES_PER_TOKEN = 3.5
"""Assumed bytes of text per BPE token. Measured: 3.0 with 2,048 ids on Python code, 4.5 with GPT-2's ids on English."""


def data_facts(data: Any, *, missing: bool = False) -> tuple[DataFacts, int | None]:
    """Return (`DataFacts` with numbers of tokens, vocabulary size) of a data module. An unknown number is None.

    Args:
        data: a data module with valid settings.
        missing: whether files of the data are not on this machine, so that numbers of tokens are unknown.
    """
    if isinstance(data, TokenShards | Mixture):
        if missing:
            return DataFacts(), data.known_vocab_size
        train, val = (data.open_split(name) for name in ("train", "val"))
        facts = DataFacts(sum(map(len, train)), sum(map(len, val)), "counted in shard headers")
        if isinstance(data, Mixture):
            facts = replace(facts, phases=tuple(data.draws()))
        return facts, data.known_vocab_size
    if missing:
        return DataFacts(), None
    if not isinstance(data, TextDataModule):
        # A user's data module knows its vocabulary only when it is open.
        closed = isinstance(data, TokenDataModule) and not data.is_open
        return DataFacts(), None if closed else getattr(data, "vocab_size", None)
    if (manifest := data.cached_manifest()) is not None:
        tokens = [manifest.splits[name].tokens if name in manifest.splits else 0 for name in ("train", "val")]
        return DataFacts(tokens[0], tokens[1], "counted when it was tokenised"), manifest.vocab_size
    tokenizer = data.source_tokenizer
    vocab_size = tokenizer.requested_size if isinstance(tokenizer, Learned) else tokenizer.vocab_size
    inputs = data.inputs()
    if not all(_is_text(data, one) for one in inputs):
        return DataFacts(), vocab_size  # the size of a compressed or structured file says little about its text
    sizes = {name: sum(one.size for one in inputs if one.split == name) for name in ("train", "val")}
    documents = {name: sum(one.split == name for one in inputs) for name in sizes}
    per_token = 1.0 if isinstance(tokenizer, Bytes | Characters) else BYTES_PER_TOKEN
    tokens = [round(size / per_token) + documents[name] for name, size in sizes.items()]
    if isinstance(tokenizer, Bytes):
        return DataFacts(tokens[0], tokens[1], "counted: one per byte and document"), vocab_size
    origin = f"estimated from {sum(sizes.values()):,} bytes at {per_token:g} a token"
    return DataFacts(tokens[0], tokens[1], origin), vocab_size


def _is_text(data: TextDataModule, one: Input) -> bool:
    is_plain = isinstance(data, GivenFiles) and one.source.is_local and data.is_plain_text(one.source)
    return is_plain or one.settings.format == "text"


def with_packing(facts: DataFacts, data: TokenDataModule, *, missing: bool) -> DataFacts:
    """Return `facts` with the number of packed `sequences` in an epoch, and a sentence `packing` about the effect of packing on
    documents. If the effect is unknown before the run, only the sentence is set, and says so."""
    unknown = replace(facts, packing="known when the run starts: its first line says it")
    if missing or data.block_size is None or not isinstance(data, TokenShards | Mixture):
        return unknown
    streams = [planned(stream, size=data.block_size) for stream in data.open_split("train")]
    known = [counts for counts in streams if counts is not None]
    if len(known) < len(streams):
        return unknown
    packed, other = (sum(each, Counts()) for each in zip(*known, strict=True))
    return replace(facts, sequences=packed.blocks, packing=report(packed, other))

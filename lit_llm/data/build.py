"""Tokenise documents into a folder of shards, for the token cache and for ``prepare``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lit_llm.disk import write_text
from lit_llm.ingest.documents import Document
from lit_llm.ingest.manifest import META_FILE
from lit_llm.ingest.shards import ShardWriter
from lit_llm.tokenizers import Learned, Tokenizer

_BATCH_BYTES = 2**22  # tokenised at once, by several threads if the tokenizer can; limits memory


def build(documents: Mapping[str, Sequence[Document]], tokenizer: Tokenizer, out: Path, *, shard_tokens: int) -> dict[str, Any]:
    """Write ``<split>_000000.bin``, ..., ``tokenizer.json`` and ``meta.json`` into the existing folder ``out``.

    The tokenizer's end-of-text token, if it has one, follows every document. A vocabulary is learned from the documents of
    "train" only. On a terminal, a progress bar counts the bytes of text.

    Args:
        documents: split name -> documents, in order.
        shard_tokens: tokens per shard.

    Returns:
        The content of ``meta.json``: {"tokenizer": identity, "vocab_size": int,
        "splits": {name: {"documents": int, "bytes": int, "tokens": int}}}.
    """
    sizes = {name: sum(document.size for document in split) for name, split in documents.items()}
    splits: dict[str, dict[str, int]] = {}
    with _progress() as progress:
        if isinstance(tokenizer, Learned) and not tokenizer.trained:
            tokenizer = copy(tokenizer)  # the configured one stays untrained: its identity is part of the cache key
            task = progress.add_task("Learning the vocabulary", total=sizes["train"])
            tokenizer.train(_texts(documents["train"], lambda size: progress.advance(task, size)))
        eos = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=np.int64)
        for name, split in documents.items():
            task = progress.add_task(f"Tokenising {name}", total=sizes[name])
            with ShardWriter(out, name, vocab_size=tokenizer.vocab_size, shard_tokens=shard_tokens) as writer:
                for pieces, ends in _batches(split):
                    for ids, end in zip(tokenizer.encode_bytes(pieces), ends, strict=True):
                        writer.write(ids)
                        if end:
                            writer.write(eos)
                    progress.advance(task, sum(map(len, pieces)))
            splits[name] = {"documents": len(split), "bytes": sizes[name], "tokens": writer.tokens}
    tokenizer.save(out)
    meta = {"tokenizer": tokenizer.identity(), "vocab_size": tokenizer.vocab_size, "splits": splits}
    write_text(out / META_FILE, json.dumps(meta, indent=2) + "\n")
    return meta


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _texts(documents: Sequence[Document], advance: Callable[[int], None]) -> Iterator[str]:
    for document in documents:
        for piece in document.pieces():
            text = piece.decode("utf-8", errors="replace")
            if "\N{REPLACEMENT CHARACTER}" in text and text.encode() != piece:
                rank_zero_warn(
                    f"{document.path} is not valid UTF-8: invalid bytes are read as U+FFFD, which has three bytes, so bits per "
                    "byte are too low. Convert the file, or use --data.tokenizer Bytes, which keeps every byte."
                )
            yield text
            advance(len(piece))


def _batches(documents: Sequence[Document]) -> Iterator[tuple[list[bytes], list[bool]]]:
    """Batches of about ``_BATCH_BYTES``: pieces of consecutive documents, and whether each piece ends its document."""
    pieces: list[bytes] = []
    ends: list[bool] = []
    size = 0
    for document in documents:
        for piece in document.pieces():
            pieces.append(piece)
            ends.append(False)
            size += len(piece)
            if size >= _BATCH_BYTES:
                # Hold back the last piece until it is known whether it ends its document.
                yield pieces[:-1], ends[:-1]
                pieces, ends, size = pieces[-1:], ends[-1:], len(pieces[-1])
        ends[-1] = True
    if pieces:
        yield pieces, ends

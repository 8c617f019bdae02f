"""Tokenise text into shards for ``TokenShards``, on this machine or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_llm.data import TextDataModule, TokenDataModule
from lit_llm.data.build import build
from lit_llm.errors import UserError


def prepare(datamodule: TokenDataModule, out: str | Path, *, shard_tokens: int = 100_000_000) -> dict[str, Any]:
    """Write ``train_000000.bin``, ..., ``val_000000.bin``, ..., ``tokenizer.json`` and ``meta.json`` into ``out``.

    Args:
        datamodule: a data module of text (``TextFiles``, ``PythonStdlib``).
        out: a folder that does not exist or is empty.
        shard_tokens: tokens per shard.

    Returns:
        A summary: {"out": str, "tokenizer": str, "vocab_size": int,
        "splits": {name: {"documents": int, "bytes": int, "tokens": int}}}.

    Raises:
        UserError: if ``out`` is not empty, or the data module has problems or no text.
    """
    if not isinstance(datamodule, TextDataModule):
        raise UserError(f"{type(datamodule).__name__} has no text to tokenise: use --data TextFiles or --data PythonStdlib.")
    out = Path(out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another folder for the shards (--out).")
    datamodule.raise_problems()
    out.mkdir(parents=True, exist_ok=True)
    summary = build(datamodule.documents(), datamodule.source_tokenizer, out, shard_tokens=shard_tokens)
    return {"out": str(out)} | summary

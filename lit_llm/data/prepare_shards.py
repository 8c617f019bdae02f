"""Tokenise text into shards for ``TokenShards``, on this machine or another."""

from __future__ import annotations

from pathlib import Path

from lit_llm.core.disk import delete
from lit_llm.core.errors import UserError
from lit_llm.data import TextDataModule, TokenDataModule
from lit_llm.ingest.progress import ProgressLog
from lit_llm.ingest.shard_pipeline import Summary
from lit_llm.ingest.token_parts import PARTS


def prepare(
    datamodule: TokenDataModule,
    out: str | Path,
    *,
    shard_tokens: int = 100_000_000,
    workers: int = 1,
    log: Path | None = None,
    keep_parts: bool = False,
) -> Summary:
    """Write ``train_000000.bin``, ..., ``val_000000.bin``, ..., ``tokenizer.json`` and ``meta.json`` into ``out``.

    The files are the same for any number of workers. An interrupted call leaves its finished parts in ``out/parts``; a call
    with the same arguments continues with them.

    Args:
        datamodule: a data module of text (``TextFiles``, ``ChatFiles``, ``PythonStdlib``).
        out: a folder that does not exist, is empty, or holds what an interrupted call has left.
        shard_tokens: tokens per shard.
        workers: processes that read and tokenise. Each needs less than 300 MB. 0: this process.
        log: a file that progress is appended to.
        keep_parts: leave ``out/parts`` to the caller.

    Raises:
        UserError: if ``out`` holds anything else, the data module has problems or no text, or a file cannot be read.
    """
    if not isinstance(datamodule, TextDataModule):
        raise UserError(
            f"{type(datamodule).__name__} has no text to tokenise: use --data TextFiles, ChatFiles or PythonStdlib."
        )
    out = Path(out).expanduser()
    continues = (out / PARTS).is_dir()
    if out.exists() and not continues and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another folder for the shards (--out).")
    datamodule.raise_problems()
    out.mkdir(parents=True, exist_ok=True)
    summary = datamodule.tokenise(out, shard_tokens=shard_tokens, workers=workers, progress=ProgressLog(log))
    if not keep_parts:
        delete(out / PARTS)
    return summary

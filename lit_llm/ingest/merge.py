"""Join the parts of a split into shards. The result depends on the order of the parts only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lit_llm.ingest.progress import Report
from lit_llm.ingest.shard_manifest import SplitInfo
from lit_llm.ingest.shards import ShardWriter
from lit_llm.ingest.token_parts import PartCounts, read_part, token_type


def merge(
    parts: Sequence[tuple[Path, PartCounts]],
    folder: Path,
    name: str,
    *,
    vocab_size: int,
    shard_tokens: int,
    masked: bool = False,
    report: Report,
) -> SplitInfo:
    """Write ``<name>_000000.bin``, ... into ``folder``.

    Args:
        parts: the path of each part, without suffix, and its counts.
        masked: the parts say which tokens are targets.
        report: takes the bytes of ids that were written since the last call, twice.
    """
    dtype, total = token_type(vocab_size), PartCounts()
    with ShardWriter(folder, name, vocab_size=vocab_size, shard_tokens=shard_tokens, masked=masked) as writer:
        for path, counts in parts:
            for ids, mask, is_end in read_part(path, dtype, masked=masked):
                writer.write(ids, mask)
                if is_end:
                    writer.end_document()
            size = counts.tokens * dtype.itemsize
            report(size, size)
            total.add(counts)
    return SplitInfo(
        tokens_blake2b=writer.tokens_blake2b,
        shards=tuple(writer.shards),
        targets=writer.targets,
        mask_blake2b=writer.mask_blake2b,
        **asdict(total),
    )

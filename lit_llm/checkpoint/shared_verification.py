"""The ranks of a run hash the shards of a checkpoint together, each file once, and agree on the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from lit_llm.callbacks._torch import gathered, process_count
from lit_llm.checkpoint.disk_format import shard_names, shard_problem
from lit_llm.checkpoint.manifest import record_damage
from lit_llm.core.errors import UserError


def verify_shards_together(checkpoint: Path) -> None:
    """Hash the shards of a checkpoint. Where a process group exists, all its ranks call this, and each hashes its share.

    A damaged checkpoint is marked on the disk, so that the next `--resume auto` takes the checkpoint before it.

    Raises:
        UserError: A shard is damaged. All ranks raise the same sentence.
    """
    ranks = process_count()
    rank = dist.get_rank() if ranks > 1 else 0
    try:
        names = share(shard_names(checkpoint), rank, ranks)
        problems = [problem for name in names if (problem := shard_problem(checkpoint, name))]
    except UserError as error:  # this rank cannot read the manifest, but the others wait for its verdict
        problems = [str(error).rstrip(".")]
    by_rank = gathered(problems)
    if not any(by_rank):
        return
    said: list[Any] = [_recorded(checkpoint, next(filter(None, by_rank))[0]) if rank == 0 else None]
    if ranks > 1:
        dist.broadcast_object_list(said)
    raise UserError(said[0])


def share(shards: list[str], rank: int, ranks: int) -> list[str]:
    """The shards that a rank hashes: its own shard if as many ranks wrote the checkpoint, and else some consecutive shards.

    A rank of another layout mostly reads consecutive shards. Every shard is in the share of exactly one rank.
    """
    return shards[rank * len(shards) // ranks : (rank + 1) * len(shards) // ranks]


def _recorded(checkpoint: Path, problem: str) -> str:
    try:
        record_damage(checkpoint, problem)
        then = "--resume auto takes the checkpoint before it from now on"
    except OSError as error:
        then = f"That cannot be recorded there ({error.strerror}), so choose an older one with --resume PATH"
    return f"checkpoint {checkpoint} is damaged: {problem}. {then}"

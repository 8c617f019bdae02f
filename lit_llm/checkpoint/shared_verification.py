"""The ranks of a run verify the shards of a checkpoint together: each shard is hashed once, and all ranks raise one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from lit_llm.callbacks._torch import gathered, process_count
from lit_llm.checkpoint.disk_format import shard_names, shard_problem
from lit_llm.checkpoint.manifest import record_damage
from lit_llm.core.errors import UserError


def verify_shards_together(checkpoint: Path) -> None:
    """Compare the shards of a checkpoint with their checksums. All ranks call this, and each rank hashes some of the shards.

    If a shard is damaged, damaged.json is written into the folder, so that `--resume auto` then takes the previous checkpoint.

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
    """The names of the shards that rank `rank` of `ranks` hashes, out of the list of all shards. Each shard has one such rank.

    If `ranks` ranks wrote the shards, a rank gets its own shard. Else it gets consecutive shards, which it mostly reads anyway.
    """
    return shards[rank * len(shards) // ranks : (rank + 1) * len(shards) // ranks]


def _recorded(checkpoint: Path, problem: str) -> str:
    try:
        record_damage(checkpoint, problem)
        then = "--resume auto takes the checkpoint before it from now on"
    except OSError as error:
        then = f"That cannot be recorded there ({error.strerror}), so choose an older one with --resume PATH"
    return f"checkpoint {checkpoint} is damaged: {problem}. {then}"

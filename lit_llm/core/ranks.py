"""Which process of a run this is, before the processes are connected."""

from __future__ import annotations

import os

from lightning.pytorch.utilities.rank_zero import rank_zero_only


def is_rank_zero() -> bool:
    """Whether this process is global rank 0; also known before a process group exists.

    Lightning reads the rank from RANK, LOCAL_RANK and SLURM_PROCID. The first process of a node that was started by hand has
    none of these, only NODE_RANK.
    """
    return getattr(rank_zero_only, "rank", 0) == 0 and os.environ.get("NODE_RANK", "0") == "0"

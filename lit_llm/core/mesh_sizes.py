"""Sizes of a device mesh's dimensions. Imports no torch, because the planner uses this module, too."""

from __future__ import annotations

import math
from typing import NamedTuple

from lit_llm.core.errors import UserError


class MeshSizes(NamedTuple):
    """Record of the number of ranks along each mesh dimension. Ranks with consecutive numbers differ in the last dimension."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor_parallel: int = 1

    @property
    def world(self) -> int:
        """Number of processes in the mesh: the product of all sizes."""
        return math.prod(self)

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different samples; ranks of a tensor, context or pipeline group read the same samples."""
        return self.replicate * self.shard


def mesh_sizes(
    world_size: int, *, replicate: int, shard: int | str, context: int = 1, tensor_parallel: int = 1, pipeline: int = 1
) -> MeshSizes:
    """Check the sizes of the mesh's dimensions on `world_size` processes, and return them.

    Args:
        shard: size of the dimension `shard`. "auto": world_size divided by the product of the other sizes.

    Raises:
        UserError: the product of the sizes is not `world_size`.
    """
    given = MeshSizes(pipeline, replicate, 1 if isinstance(shard, str) else shard, context, tensor_parallel)
    fixed = given.world
    sizes = given._replace(shard=max(1, world_size // fixed)) if isinstance(shard, str) else given
    if sizes.world == world_size:
        return sizes
    if isinstance(shard, str):
        below = world_size // fixed * fixed
        use = f"{below} or {below + fixed}" if below else f"{fixed}"
        needs = f"a multiple of {fixed}"
    else:
        needs = use = f"{fixed}"
    processes = "process" if needs == "1" else "processes"
    words = ", ".join(f"{name} {size}" for name, size in given._replace(shard=shard)._asdict().items())  # type: ignore[arg-type]
    raise UserError(
        f"MeshStrategy with {words} needs {needs} {processes}, but the run has {world_size}: use {use} (--trainer.devices, "
        "--trainer.num_nodes), or change --trainer.strategy.replicate, .shard, .context, .tensor_parallel or .pipeline."
    )

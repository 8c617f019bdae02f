"""The dimensions of a device mesh. Without torch, so that the planner and `MeshStrategy` share them."""

from __future__ import annotations

from lit_llm.errors import UserError


def mesh_sizes(replicate: int, shard: int | str, tensor_parallel: int, world_size: int) -> tuple[int, int, int]:
    """(replicate, shard, tensor_parallel) on `world_size` processes.

    Args:
        shard: "auto" is world_size / (replicate · tensor_parallel).

    Raises:
        UserError: if the product of the three is not `world_size`.
    """
    fixed = replicate * tensor_parallel
    size = max(1, world_size // fixed) if isinstance(shard, str) else shard
    if fixed * size == world_size:
        return replicate, size, tensor_parallel
    if isinstance(shard, str):
        below = world_size // fixed * fixed
        use = f"{below} or {below + fixed}" if below else f"{fixed}"
        needs = f"with replicate {replicate} and tensor_parallel {tensor_parallel} needs a multiple of {fixed} processes"
    else:
        use = f"{fixed * size}"
        needs = f"with replicate {replicate}, shard {shard} and tensor_parallel {tensor_parallel} needs {use} processes"
    raise UserError(
        f"MeshStrategy {needs}, but the run has {world_size}: use {use} (--trainer.devices, --trainer.num_nodes), or change "
        "--trainer.strategy.replicate, .shard or .tensor_parallel."
    )

"""Expert parallelism of a GPT: each rank has some experts of a layer, and ranks send tokens' activations to the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lit_llm.distributed.tensor_parallel import distribute_parameters
from lit_llm.models.expert_shard import ExpertShard
from lit_llm.models.experts import Experts
from lit_llm.models.gpt import GPT

if TYPE_CHECKING:
    from lit_llm.distributed.mesh_strategy import MeshStrategy


def apply_expert_parallel(model: GPT, strategy: MeshStrategy) -> DeviceMesh | None:
    """Divide each layer's experts over `strategy.expert` ranks, and tell routers which ranks share a sequence. In place.

    Ranks along shard, context and tensor_parallel all have tokens of their own (under tensor parallelism, a part of the
    sequence). So each expert is whole on its rank, although tensor parallelism splits all other matrices.

    Returns:
        The mesh over which `apply_fsdp` shards experts. None: experts are sharded over the mesh of all other parameters.
    """
    sizes = strategy.sizes(strategy.world_size)
    groups = [mesh.get_group().group_name for mesh in (strategy.context_mesh, strategy.tensor_mesh) if mesh is not None]
    for router in model.routers:
        router.sequence_groups = tuple(groups)
    if strategy.expert == 1 and sizes.tensor_parallel == 1:
        return None
    holders, mesh = strategy.expert_meshes()
    shard = ExpertShard(
        "" if mesh is None else mesh.get_group().group_name, strategy.expert, sizes.tensor_parallel / strategy.expert
    )
    for block in model.blocks:
        if isinstance(block.mlp, Experts):
            block.mlp.shard = shard
            if mesh is not None:
                for stack in block.mlp.stacks:
                    distribute_parameters(Shard(0), "", stack, mesh)
    return holders

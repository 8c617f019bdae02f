"""Expert parallelism of a GPT: ranks share the experts of a layer, and send each other the rows of their tokens."""

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
    """Divide the experts of each layer over `strategy.expert` ranks; returns the mesh that shards them, for `apply_fsdp`.

    Ranks along shard, context and tensor_parallel all have tokens of their own: under tensor parallelism those of their part of
    the sequence. So experts are whole on one rank, however many share a matrix elsewhere. Routers learn who shares a sequence
    with them. None: the mesh of other parameters shards experts too.
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

"""Context parallelism of a GPT: each rank processes a part of the positions of each sequence."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from lit_llm.distributed.parallel_layout import Layout
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.sequence_shard import ContextAttention, SequenceShard


def apply_context_parallel(model: GPT, mesh: DeviceMesh, kind: ContextAttention) -> None:
    """Split each sequence of a batch with targets over the ranks of the 1-D mesh `mesh`. Changes the model in place.

    Every rank gets the whole batch and computes the loss of its part of the positions. Ranks communicate in attention only, and
    have equal work in it. A rank has the gradients of its own loss, so FSDP2 must average gradients over these ranks, too.

    `kind`: what ranks exchange in attention: "gather" (all keys and values) or "heads" (see `MeshStrategy`).
    """
    model.sequence_shard = SequenceShard(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), kind)


def context_problems(config: GPTConfig, layout: Layout) -> list[str]:
    """Return a sentence for each reason why `layout.context` ranks cannot share the sequences of a model."""
    problems = []
    if layout.context > config.block_size:
        problems.append(
            f"context={layout.context}, but a sequence has {config.block_size} positions (model.block_size): use at most "
            f"--trainer.strategy.context {config.block_size}"
        )
    heads, ranks = config.kv_heads, layout.tensor_parallel
    # A divisor of the key-value heads divides the query heads, too.
    if layout.context_attention == "heads" and heads // ranks % layout.context:
        fitting = max(n for n in range(1, layout.context) if heads // ranks % n == 0)
        name = "model.n_head" if heads == config.n_head else "model.n_kv_head"
        where = f"{name} = {heads}" if ranks == 1 else f"{name} / tensor_parallel = {heads} / {ranks}"
        problems.append(
            f"context_attention is heads, but context={layout.context} does not divide {where}: use "
            f"--trainer.strategy.context_attention gather, or --trainer.strategy.context {fitting}"
        )
    return problems

"""What CUDA's allocator reserves for a run on a GPU, which is more than tensors take.

It keeps a pool of memory for each stream and lends nothing between them. FSDP2 gathers weights and reduces gradients on
streams of their own. So their buffers take memory also while they are not used, and so do the sharded gradients, which are
parts of what was reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

from lit_llm.plan.layout import Layout
from lit_llm.plan.weights import Weight, gathered_bytes, gathered_groups, is_tied, reduced_bytes, stored_bytes

CONTEXT_GB = 1.0
"""GPU memory of the driver's context and of NCCL, beside what torch reserves. An assumption."""
SLACK = 1.03
"""Memory that CUDA's allocator reserves over what it allocates at the peak: the median of 25 runs whose logs have both figures,
1.003 to 1.159 (benchmarks/published_memory.py)."""


@dataclass(frozen=True)
class Pools:
    """Bytes that FSDP2's streams reserve at their peaks.

    Attributes:
        gathers: buffers of all-gathers.
        gradients: the rank's shard of the gradients. They are parts of what the reductions write.
        reductions: buffers of reduce-scatters.
    """

    gathers: int = 0
    gradients: int = 0
    reductions: int = 0


def pools_of(weights: tuple[Weight, ...], layout: Layout, sizes: tuple[int, int]) -> Pools:
    """The pools of FSDP2: the largest group of weights is gathered while the next ones are prefetched; one is reduced.

    Args:
        sizes: bytes of an element of the weights, and in matrix products.
    """
    shards = layout.divisor("parameters")
    groups = gathered_groups(weights, tied=layout.pipeline.ranks == 1 and is_tied(weights))[:3]
    gathered = [sum(gathered_bytes(group, *sizes)) for group in groups]
    return Pools(
        gathers=(max(gathered) + layout.prefetch * gathered[0]) * (shards + 1) // shards,
        gradients=0 if layout.cpu_offload else stored_bytes(weights, sizes[0], trainable=True) // shards,
        reductions=max(map(reduced_bytes, groups)),
    )


def reserved_bytes(resident: int, moments: list[tuple[dict[str, int], int]], pools: Pools) -> int:
    """What CUDA's allocator reserves: the peak of the stream that computes, and the pools of the others.

    Args:
        resident: bytes of weights and optimizer state.
        moments: of each phase of the step, what it adds by kind, and what else the computing stream holds.
    """
    pooled = "gradients" if pools.gradients else ""
    computing = max(sum(n for kind, n in added.items() if kind != pooled) + own for added, own in moments)
    return round(SLACK * (resident + computing + pools.gathers + pools.gradients + pools.reductions))

"""Bytes and seconds that ranks spend talking, over two levels of bandwidth: within a node, and between nodes.

Bandwidths are in GB/s per device and direction, latencies in seconds per message. M is bytes of the whole tensor on each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

LATENCY_SECONDS = 10e-6
"""Of one message: an assumption (NCCL over NVLink 5 to 10, over InfiniBand 10 to 20 microseconds)."""


@dataclass(frozen=True)
class Links:
    """Bandwidth between devices of one node and of several, GB/s per device and direction, and devices in a node."""

    node_gbps: float
    network_gbps: float
    devices_per_node: int


def ring_all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends: 2(n − 1)/n · M. A reduce-scatter or an all-gather is half of it."""
    return 2 * (ranks - 1) / ranks * size


def ring_all_reduce_seconds(size: float, ranks: int, gbps: float, latency_seconds: float = 0.0) -> float:
    """2(n − 1)/n · M / bandwidth + 2(n − 1) · latency."""
    return ring_all_reduce_bytes(size, ranks) / (gbps * 1e9) + 2 * (ranks - 1) * latency_seconds


def all_reduce_seconds(size: float, ranks: int, links: Links, *, stride: int = 1) -> float:
    """All-reduce over two levels: reduced within nodes, then between nodes by each device for its part, then spread within
    nodes.

    Args:
        ranks: in the group.
        stride: distance between neighbours of the group; ranks that lie a node apart talk over the network alone.
    """
    if ranks == 1:
        return 0.0
    inside = max(1, min(ranks, links.devices_per_node // stride))
    nodes = -(-ranks // inside)
    seconds = ring_all_reduce_seconds(size, inside, links.node_gbps, LATENCY_SECONDS) if inside > 1 else 0.0
    if nodes > 1:
        seconds += ring_all_reduce_seconds(size / inside, nodes, links.network_gbps, LATENCY_SECONDS)
    return seconds


def gather_seconds(size: float, ranks: int, links: Links, *, stride: int = 1) -> float:
    """All-gather or reduce-scatter of a tensor of `size` bytes: half an all-reduce."""
    return all_reduce_seconds(size, ranks, links, stride=stride) / 2


def ddp_bytes(gradient_bytes: float, ranks: int) -> float:
    """Bytes per rank and step: one all-reduce of the gradients."""
    return ring_all_reduce_bytes(gradient_bytes, ranks)


def fsdp_bytes(parameter_bytes: float, gradient_bytes: float, ranks: int, *, reshard: bool = True) -> float:
    """Bytes per rank and micro-batch: weights gathered forward and, if given back in between, backward; gradients scattered.

    With gradients as wide as weights and resharding that is 1.5 times DDP's.
    """
    return (ranks - 1) / ranks * (parameter_bytes * (2 if reshard else 1) + gradient_bytes)


def tensor_parallel_bytes(tokens: int, width: int, layers: int, bytes_per_element: int, ranks: int) -> float:
    """Bytes per rank and micro-batch: four all-reduces of the stream per layer, two forward and two backward (Megatron-LM)."""
    return 4 * layers * ring_all_reduce_bytes(tokens * width * bytes_per_element, ranks)


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Share of a step in which a stage waits: (p − 1)/(m + p − 1) (GPipe, Huang et al. 2019)."""
    return (stages - 1) / (micro_batches + stages - 1)


def exposed_seconds(communication_seconds: float, hideable_seconds: float) -> float:
    """What is left to wait for when `hideable_seconds` of computation run beside the communication."""
    return max(0.0, communication_seconds - hideable_seconds)


def synchronous_step_seconds(rank_seconds: list[float]) -> tuple[float, float, float]:
    """A synchronous step takes the slowest rank's time: (maximum, mean, spread = maximum/mean − 1)."""
    slowest, mean = max(rank_seconds), sum(rank_seconds) / len(rank_seconds)
    return slowest, mean, slowest / mean - 1

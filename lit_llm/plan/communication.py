"""Bytes and seconds of collective communication, with one bandwidth within a node and another between nodes.

Bandwidths are in GB/s per device and direction, latencies in seconds per message. M is the size in bytes of the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

LATENCY_SECONDS = 10e-6
"""Latency of one message. An assumption: NCCL takes 5 to 10 microseconds over NVLink, 10 to 20 over InfiniBand."""


@dataclass(frozen=True)
class Links:
    """Bandwidth within a node and between nodes, in GB/s per device and direction, and the number of devices per node."""

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
    """Two-level all-reduce: reduce-scatter within each node, all-reduce between nodes, all-gather within each node.

    Args:
        size: bytes of the tensor.
        ranks: size of the group.
        stride: distance between neighbouring ranks of the group. If it is a whole node, all traffic crosses the network.
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
    """Bytes per rank and micro-batch: one all-gather forward, another backward with `reshard`, and one reduce-scatter.

    With gradients as wide as the weights and resharding, this is 1.5 times the bytes of DDP.
    """
    return (ranks - 1) / ranks * (parameter_bytes * (2 if reshard else 1) + gradient_bytes)


def tensor_parallel_bytes(tokens: int, width: int, layers: int, bytes_per_element: int, ranks: int) -> float:
    """Bytes per rank and micro-batch: per layer, two all-reduces of the activations forward and two backward (Megatron-LM)."""
    return 4 * layers * ring_all_reduce_bytes(tokens * width * bytes_per_element, ranks)


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Fraction of a step in which a pipeline stage is idle: (p − 1)/(m + p − 1) (GPipe, Huang et al. 2019)."""
    return (stages - 1) / (micro_batches + stages - 1)


def exposed_seconds(communication_seconds: float, hideable_seconds: float) -> float:
    """Communication that does not overlap with `hideable_seconds` of computation."""
    return max(0.0, communication_seconds - hideable_seconds)

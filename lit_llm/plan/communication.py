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


def fsdp_bytes(
    blocks: float,
    others: float,
    gradients: float,
    ranks: int,
    *,
    micro_batches: int = 1,
    keep_weights: bool = False,
    reduce_once: bool = True,
) -> float:
    """Bytes per rank and optimizer step of FSDP2's all-gathers and reduce-scatters.

    With gradients as wide as the weights and resharding, this is at most 1.5 times the bytes of DDP in a step of one
    micro-batch.

    Args:
        blocks: bytes of the blocks' weights as they are gathered (2 per element of a matrix under bf16-mixed).
        others: the same of embedding, last norm and head, which backward does not gather again.
        gradients: bytes of the whole gradients in the dtype of the reduction, fp32.
        ranks: that shard the parameters.
        keep_weights: weights are gathered once a step, instead of twice in each micro-batch.
        reduce_once: gradients are reduced once a step, instead of after each micro-batch.
    """
    gathered = blocks + others if keep_weights else micro_batches * (2 * blocks + others)
    return (ranks - 1) / ranks * (gathered + gradients * (1 if reduce_once else micro_batches))


def tensor_parallel_sizes(
    tokens: int,
    width: int,
    layers: int,
    ranks: int,
    *,
    parameter_bytes: int,
    compute_bytes: int,
    first: bool = True,
    last: bool = True,
    positions: int = 0,
    recompute: bool = False,
) -> list[float]:
    """Bytes of the whole tensors that tensor-parallel ranks gather or scatter in a micro-batch, one for each collective.

    Each layer gathers the outputs of two norms, in the parameters' dtype, and scatters two results of matrix products; the
    backward pass does the reverse. The embedding scatters, the last norm gathers, and the loss gathers three fp32 numbers a
    token from each rank.

    Args:
        first, last: this rank has the embedding, or the last norm and the loss.
        positions: rows of learned positions that a batch uses, whose gradients are gathered.
        recompute: blocks run forward once more, up to the last product.
    """
    stream, product = float(tokens * width * parameter_bytes), float(tokens * width * compute_bytes)
    layer = [stream, product] * 4 + ([stream, product, stream] if recompute else [])
    sizes = layer * layers + [stream] * 2 * (first + last)
    if first and positions:
        sizes.append(positions * width * parameter_bytes)
    return [*sizes, 12 * tokens * ranks] if last else sizes


def exchange_seconds(size: float, ranks: int, links: Links, *, stride: int = 1) -> float:
    """All-to-all in which each rank has `size` bytes, of which it keeps 1/n. What goes to other nodes crosses the network."""
    inside = max(1, min(ranks, links.devices_per_node // stride))
    within = (inside - 1) / ranks * size / (links.node_gbps * 1e9)
    between = (ranks - inside) / ranks * size / (links.network_gbps * 1e9)
    return within + between + (ranks - 1) * LATENCY_SECONDS


@dataclass(frozen=True)
class Exchange:
    """Seconds of communication of a rank in a step, at full bandwidth.

    Attributes:
        waiting: in the middle of computation, which waits for it.
        behind: computation continues: (seconds, times in a step, share of a micro-batch's computation that they may overlap).
        after: after computation.
    """

    waiting: float = 0.0
    behind: tuple[tuple[float, int, float], ...] = ()
    after: float = 0.0

    @property
    def total(self) -> float:
        return self.waiting + sum(seconds * times for seconds, times, _ in self.behind) + self.after

    def exposed(self, micro_batch_seconds: float, least: float, waiting: float) -> float:
        """Seconds that computation waits.

        Args:
            least: the share of communication behind computation that is exposed, however long computation takes.
            waiting: the share of `self.waiting`.
        """
        late = sum(max(least * s, s - share * micro_batch_seconds) * times for s, times, share in self.behind)
        return self.waiting * waiting + late + self.after

"""Count the communication of collectives: the calls that torch makes on this rank and their bytes, by mesh dimension and kind.

    with Traffic(strategy.device_mesh) as traffic:
        step()
    rows = traffic.rows()

Bytes are counted as in a ring algorithm, the convention of `lit_llm.plan.collectives`: for a whole tensor of M bytes on n
ranks, each rank sends 2(n − 1)/n · M in an all-reduce, and (n − 1)/n · M in an all-gather, a reduce-scatter or an all-to-all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lit_llm.core._torch import DispatchMode, group_of, tensors_in

_KINDS = {  # operators of torch's two interfaces to collectives: c10d's in place, and the functional one of DTensor
    "all_gather": (
        *("_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
        *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"),
    ),
    "reduce_scatter": (
        *("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out"),
    ),
    "all_reduce": (
        *("allreduce_", "allreduce_coalesced_"),
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    ),
    "all_to_all": ("alltoall_", "alltoall_base_", "all_to_all_single", "shard_dim_alltoall"),
    "broadcast": ("broadcast_", "broadcast"),
    "reduce": ("reduce_",),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "send": ("send", "isend"),
    "receive": ("recv_", "recv_any_source_", "irecv"),
}
_KIND_OF = {operator: kind for kind, operators in _KINDS.items() for operator in operators}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_OUTPUT_FIRST = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Kinds of collectives whose operators in c10d have the output as first argument, and the input as second argument."""
_SENT: dict[str, Callable[[int], float]] = {  # bytes that a rank sends in a group of n, as a multiple of the whole tensor
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "receive": lambda n: 0.0,
}


class Collectives(NamedTuple):
    """Record of this rank's calls of one kind of collective along one mesh dimension: how many, and how many bytes."""

    dimension: str
    """Name of the mesh dimension; "world" for all ranks, "other" for a group that belongs to no mesh."""
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, reduce, gather, scatter, send or receive."""
    ranks: int
    """The number of ranks in the process group."""
    calls: int
    size: int
    """The sum over calls of the bytes of the whole tensor: the gathered tensor, or the tensor before it is scattered."""
    sent: float
    """The bytes that this rank sends in all calls."""


class Traffic(DispatchMode):
    """A context manager that counts the collectives of this rank, also those of backward passes and of fake tensors.

    Compiled functions run eagerly in this context, because torch does not run compiled code under a dispatch mode.

    Args:
        meshes: device meshes. The names of their dimensions stand for process groups; the first name if a group has several.
    """

    supports_higher_order_operators = True

    def __init__(self, *meshes: DeviceMesh) -> None:
        super().__init__()
        self._dimensions: dict[str, str] = {}
        for mesh in meshes:
            for name in mesh.mesh_dim_names or ():
                self._dimensions.setdefault(mesh.get_group(name).group_name, name)
        if dist.is_initialized() and dist.group.WORLD is not None:
            self._dimensions.setdefault(dist.group.WORLD.group_name, "world")
        self._counts: dict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0])  # calls, bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it then runs on local tensors, with the collectives that it needs
        namespace, _, name = func.name().partition(".")[0].partition("::")
        if namespace in _NAMESPACES and name in _KIND_OF:
            self._count(
                _KIND_OF[name], args, kwargs or {}, output_first=namespace == "c10d" and _KIND_OF[name] in _OUTPUT_FIRST
            )
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, args: Any, kwargs: dict[str, Any], *, output_first: bool) -> None:
        group = group_of((*args, *kwargs.values()))
        size = sum(t.numel() * t.element_size() for t in tensors_in(args[output_first]))
        if kind in ("all_gather", "gather"):
            size *= group.size()
        dimension = self._dimensions.get(group.group_name, "other")
        counts = self._counts[dimension, kind, group.size()]
        counts[0] += 1
        counts[1] += size

    def rows(self) -> list[Collectives]:
        """One `Collectives` per mesh dimension, kind and number of ranks, sorted by the bytes sent, the most first."""
        collectives = [
            Collectives(dimension, kind, ranks, calls, size, _SENT.get(kind, lambda n: 1.0)(ranks) * size)
            for (dimension, kind, ranks), (calls, size) in self._counts.items()
        ]
        return sorted(collectives, key=lambda row: (-row.sent, row.dimension, row.kind))

    def sent(self, dimension: str | None = None, kind: str | None = None) -> float:
        """The bytes that this rank has sent along `dimension` (None: all) by collectives of the kind `kind` (None: all)."""
        return sum(row.sent for row in self.rows() if dimension in (None, row.dimension) and kind in (None, row.kind))

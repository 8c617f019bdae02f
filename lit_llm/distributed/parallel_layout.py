"""The parallel layout of a run as a dataclass for the planner, and the layouts with names such as "fsdp2-tp"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_llm.core.errors import UserError
from lit_llm.core.mesh_sizes import MeshSizes, mesh_sizes
from lit_llm.distributed.keep_rule import KeptWhole, keep
from lit_llm.distributed.pipeline_layers import KINDS, PipelineLayout

_MESHES: dict[str, Callable[[int, int], dict[str, int]]] = {  # (devices, devices in a node) → sizes other than the defaults
    "fsdp": lambda n, node: {},
    "fsdp2": lambda n, node: {},
    "hsdp": lambda n, node: {"replicate": n // node, "shard": node},
    "tp": lambda n, node: {"tensor_parallel": n, "shard": 1},
    "fsdp2-tp": lambda n, node: {"tensor_parallel": 2},
    "cp": lambda n, node: {"context": n, "shard": 1},
    "fsdp2-cp": lambda n, node: {"context": 2},
    "pp": lambda n, node: {"pipeline": n, "shard": 1},
    "fsdp2-pp": lambda n, node: {"pipeline": 2},
    "3d": lambda n, node: {"pipeline": 2, "tensor_parallel": 2},
    "4d": lambda n, node: {"pipeline": 2, "context": 2, "tensor_parallel": 2},
    "ep": lambda n, node: {"expert": n},
    "fsdp2-ep": lambda n, node: {"expert": 2},
    "ep-tp": lambda n, node: {"tensor_parallel": 2, "expert": 2},
    "ep-pp": lambda n, node: {"pipeline": 2, "expert": 2},
}
_WITHOUT_MESH = ("single", "ddp", "zero1", "zero2")  # zero1 and zero2 are layouts of other programs, for comparisons
STRATEGIES = ("single", "ddp", *_MESHES)
FSDP2 = "recipes/strategy/fsdp2.yaml"
NO_PIPELINE = PipelineLayout(1)
NOTHING_KEPT = KeptWhole(weights=False, gradients=False)


@dataclass(frozen=True)
class Layout:
    """Record of a run's parallel layout: pipeline · replicate · shard · context · tensor_parallel ranks.

    Attributes:
        strategy: one of `STRATEGIES`, or "mesh" for other sizes of a MeshStrategy; "zero1" and "zero2" for comparisons.
        kept: whether ranks keep whole weights and whole gradients within a step. If not, weights are freed between forward and
            backward, and between micro-batches; gradients are reduced over shards after each micro-batch.
        auto: "weights", "gradients" or both, if `kept` depends on the hardware for these (`lit_llm.plan.memory.resolved`).
        prefetch: number of blocks whose weights are gathered ahead.
        bucket_copies: DDP keeps its buckets in addition to the gradients (no gradient_as_bucket_view).
        context: ranks that share each sequence. FSDP2 shards parameters over these ranks too.
        context_attention: what the ranks of `context` exchange, "gather" (keys and values) or "heads".
        expert: ranks that share the experts of a layer.
    """

    strategy: str = "single"
    replicate: int = 1
    shard: int = 1
    tensor_parallel: int = 1
    kept: KeptWhole = NOTHING_KEPT
    auto: tuple[Literal["weights", "gradients"], ...] = ()
    prefetch: int = 1
    cpu_offload: bool = False
    bucket_copies: bool = False
    context: int = 1
    context_attention: Literal["gather", "heads"] = "gather"
    pipeline: PipelineLayout = NO_PIPELINE
    expert: int = 1

    @property
    def sizes(self) -> MeshSizes:
        """The number of ranks in each dimension of the mesh."""
        return MeshSizes(self.pipeline.ranks, self.replicate, self.shard, self.context, self.tensor_parallel)

    @property
    def devices(self) -> int:
        return self.sizes.world

    @property
    def data_parallel(self) -> int:
        return self.sizes.data_parallel

    @property
    def is_mesh(self) -> bool:
        return self.strategy not in _WITHOUT_MESH

    @property
    def shards(self) -> str:
        """What data-parallel ranks shard: "nothing"; "optimizer": the optimizer state (ZeRO-1); "gradients": gradients and
        optimizer state (ZeRO-2); "parameters": parameters, gradients and optimizer state (ZeRO-3 and FSDP)."""
        if self.is_mesh:
            return "parameters" if self.shard * self.context > 1 else "nothing"
        return {"zero1": "optimizer", "zero2": "gradients"}.get(self.strategy, "nothing")

    @property
    def fsdp2(self) -> bool:
        """Whether FSDP2 wraps the model: to shard parameters, or only to reduce the gradients of replicas or to offload."""
        return self.shards == "parameters" or (self.is_mesh and (self.data_parallel * self.context > 1 or self.cpu_offload))

    @property
    def splits_model(self) -> bool:
        """Whether ranks have different parts of the weights. If so, each rank writes its part of a checkpoint by default."""
        split = self.shards == "parameters" or self.tensor_parallel > 1 or self.pipeline.ranks > 1
        return self.devices > self.replicate and split

    @property
    def owners(self) -> tuple[tuple[int, ...], int]:
        """How many ranks divide Muon's work: (sizes of the mesh dimensions that split a matrix, number of replicas).

        The sizes are (tensor_parallel, ranks that shard parameters). Without a mesh: ((), 1)."""
        return ((self.tensor_parallel, self.divisor("parameters")), self.replicate) if self.is_mesh else ((), 1)

    def divisor(self, what: str) -> int:
        """Number of ranks that share `what`: "parameters", "gradients" or "optimizer" (state)."""
        order = ("nothing", "optimizer", "gradients", "parameters")
        return self.shard * self.context if order.index(self.shards) >= order.index(what) else 1

    def sharded(self) -> Layout:
        """A copy of this layout with the recipe fsdp2.yaml: all data-parallel ranks shard parameters; there are no replicas."""
        layout = replace(self, strategy="fsdp2", replicate=1, shard=self.data_parallel)
        return replace(layout, bucket_copies=False, auto=("weights", "gradients"))

    def smaller_meshes(self, devices_per_node: int) -> Iterator[tuple[str, Layout]]:
        """Yield (command-line flags, layout) for meshes of the same devices with fewer shards than this layout.

        In each, one of tensor_parallel, pipeline and context is 2, 4, 8, … times as large, and `shard` as many times smaller. A
        layout without a mesh is first replaced by `sharded`."""
        flag = "--trainer.strategy."
        mesh, words = (self, "") if self.is_mesh else (self.sharded(), f"--config {FSDP2} ")
        dimensions = {"tensor_parallel": mesh.tensor_parallel, "pipeline": mesh.pipeline.ranks, "context": mesh.context}
        for name, size in dimensions.items():
            times = 2
            while mesh.shard % times == 0 and (name == "pipeline" or size * times <= devices_per_node):
                value: Any = mesh.pipeline._replace(ranks=size * times) if name == "pipeline" else size * times
                smaller = replace(mesh, shard=mesh.shard // times, **{name: value})
                yield f"{words}{flag}{name} {size * times} {flag}shard auto", smaller
                times *= 2


def layout_of_name(name: str, devices: int, devices_per_node: int) -> Layout:
    """The layout that the strategy `name` means: one of `STRATEGIES`, such as "fsdp2-tp", or Lightning's "auto" or "ddp…".

    Raises:
        UserError: the name is unknown, or its mesh does not fit the number of devices.
    """
    if devices < 1:
        raise UserError(f"devices must be at least 1, not {devices} (--devices).")
    name = "ddp" if name == "auto" or name.startswith("ddp") else name
    if name not in STRATEGIES:
        raise UserError(f"Cannot plan for strategy {name!r}: use {', '.join(STRATEGIES)} or MeshStrategy (--trainer.strategy).")
    if name == "single" and devices > 1:
        raise UserError(f"Strategy single uses one device, not {devices}: set --devices 1 or another --trainer.strategy.")
    if devices == 1:
        return Layout(name if name != "ddp" else "single")
    if name == "ddp":
        return Layout("ddp", replicate=devices, bucket_copies=True)
    mesh = _MESHES[name](devices, min(devices, devices_per_node))
    expert = mesh.pop("expert", 1)
    sizes = mesh_sizes(devices, **{"replicate": 1, "shard": "auto"} | mesh)  # type: ignore[arg-type]
    resharding: Any = True if name == "fsdp" else "auto"  # as `MeshStrategy.from_fsdp1` translates it
    layout = mesh_layout(sizes, PipelineLayout(sizes.pipeline), reshard_after_forward=resharding, expert=expert)
    return replace(layout, strategy=name)


def mesh_layout(
    sizes: MeshSizes,
    pipeline: PipelineLayout,
    *,
    reshard_after_forward: bool | Literal["auto"] = "auto",
    reduce_each_micro_batch: bool | Literal["auto"] = "auto",
    **options: Any,
) -> Layout:
    """The layout of a MeshStrategy whose mesh has the sizes `sizes`.

    Args:
        reshard_after_forward, reduce_each_micro_batch: as in `MeshStrategy`.
        options: further attributes of `Layout`.
    """
    asked = {"weights": reshard_after_forward, "gradients": reduce_each_micro_batch}
    settled: tuple[str, ...] = ()
    if sizes.pipeline > 1:
        settled = ("gradients", "weights") if KINDS[pipeline.schedule].splits_backward else ("gradients",)
    return Layout(
        "mesh",
        sizes.replicate,
        sizes.shard,
        sizes.tensor_parallel,
        kept=keep(*asked.values(), pipeline=sizes.pipeline > 1, weight_bytes=1, gradient_bytes=1, memory=0),
        auto=tuple(name for name, value in asked.items() if value == "auto" and name not in settled),  # type: ignore[misc]
        context=sizes.context,
        pipeline=pipeline,
        **options,
    )

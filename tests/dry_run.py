"""A dry run: one optimizer step of the real code as one rank of a cluster, without the other ranks, data or memory.

The Trainer, the strategy with its meshes, the model, its loss, clipping and the optimizer are those of `fit`. Tensors have
sizes and no data, and collectives return at once. What is counted does not depend on values.

A step of many micro-batches is extended from two short ones, because every micro-batch between the first and the last ones adds
the same.
"""

from __future__ import annotations

import copy
import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from fake_cluster import FakeEnvironment, fake_cluster
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from live_memory import LiveMemory
from sizes_only import without_data
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lit_llm.callbacks import EMA
from lit_llm.core.dtensor import local_part
from lit_llm.core.memory import without_garbage_collection
from lit_llm.core.mesh_sizes import MeshSizes
from lit_llm.distributed.mesh_strategy import MeshStrategy, loss_scaling
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.traffic import Collectives, Traffic
from lit_llm.training.language_model import LanguageModel


@dataclass(frozen=True)
class Cluster:
    """Machines with `per_node` processes each."""

    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Batch:
    """What the data module of a run gives.

    Attributes:
        sequences: of a micro-batch on one rank.
        length: tokens of a sequence.
        micro_batches: of an optimizer step.
        sources: names of the sources of a mixture.
        has_documents: batches have the numbers of documents.
        every_target_counts: no target is ignored.
    """

    sequences: int
    length: int
    micro_batches: int
    vocab_size: int
    sources: tuple[str, ...] = ()
    has_documents: bool = False
    every_target_counts: bool = True


@dataclass(frozen=True)
class Counted:
    """One optimizer step of one rank: bytes by kind at the peak, and collectives by (dimension, kind, ranks)."""

    memory: dict[str, int]
    collectives: dict[tuple[str, str, int], Collectives]

    def extended(self, longer: Counted, periods: int, *, memory_grows: bool) -> Counted:
        """The step with `periods` times what `longer` has more than this one, in addition.

        Args:
            memory_grows: each micro-batch adds to the peak. False: the peak is that of `longer`.
        """
        memory = dict(longer.memory)
        if memory_grows:
            memory = {kind: size + (periods - 1) * (size - self.memory.get(kind, 0)) for kind, size in memory.items()}
        collectives = {}
        for key in {**self.collectives, **longer.collectives}:
            none = Collectives(*key, 0, 0, 0.0)
            a, b = self.collectives.get(key, none), longer.collectives.get(key, none)
            added = (x + periods * (y - x) for x, y in zip(a[3:], b[3:], strict=True))
            collectives[key] = Collectives(*key, *added)  # type: ignore[arg-type]
        return Counted(memory, collectives)


@dataclass(frozen=True)
class RankRun:
    """What a dry run found for one rank.

    Attributes:
        place: its coordinate in each dimension of the mesh.
        parameters: numbers that it holds, its part of sharded ones.
        layers: indices of the blocks that it computes.
        memory: bytes by kind at the peak of the step.
        collectives: of an optimizer step, most bytes first.
        counted: numbers of micro-batches of the steps that were run. Several: the step was extended from them.
        seconds: that the dry run took.
    """

    rank: int
    place: MeshSizes
    parameters: int
    layers: list[int]
    memory: dict[str, int]
    collectives: list[Collectives]
    counted: list[int]
    seconds: float

    @property
    def peak(self) -> int:
        """Peak memory of the step, in bytes."""
        return sum(self.memory.values())

    @property
    def sent(self) -> float:
        """Bytes that the rank sends in a step."""
        return sum(row.sent for row in self.collectives)


@dataclass(frozen=True)
class DryRun:
    """What is run. The objects are used once: each rank needs new ones.

    Attributes:
        strategy: MeshStrategy, or "auto" for one process.
        callbacks: those that take part in a step.
        trainer: further settings of the Trainer.
        for_accelerator: the run is for accelerators, whose choices apply where they differ from a CPU's.
    """

    cluster: Cluster
    batch: Batch
    model: LanguageModel
    strategy: Strategy | str
    precision: str
    callbacks: list[Callback]
    trainer: dict[str, Any]
    for_accelerator: bool

    def rank(self, rank: int, *, in_full: bool = False) -> RankRun:
        """Run one optimizer step as `rank`.

        Args:
            in_full: run every micro-batch, instead of extending shorter steps.

        Raises:
            UserError: what only the running code refuses.
        """
        _quiet()
        began = time.perf_counter()
        strategy, count = self.strategy, self.batch.micro_batches
        sizes = MeshSizes()
        if isinstance(strategy, MeshStrategy):
            sizes = strategy.sizes(self.cluster.world)
            strategy.sharded_checkpoints = False  # nothing is saved, and its process group is a real one
            strategy.broadcast = lambda obj, src=0: obj  # type: ignore[method-assign]  # nobody sends
            strategy.model_to_device = lambda: None  # type: ignore[method-assign]  # it is there; plain tensors cannot move
        layout = strategy.pipeline_layout if isinstance(strategy, MeshStrategy) else PipelineLayout(1)
        counts = [count] if in_full else short_steps(layout, count)
        observer = _Observer(counts, for_accelerator=self.for_accelerator)
        with fake_cluster(rank, self.cluster.world):
            trainer = self._trainer(rank, strategy, observer)
            with observer.stack:
                trainer.fit(self.model, datamodule=_NoData(self.batch, observer))
            counted = observer.steps[0]
            if len(counts) > 1:
                periods, grows = (count - counts[0]) // (counts[1] - counts[0]), layout.ranks > 1 and layout.schedule == "gpipe"
                counted = counted.extended(observer.steps[1], periods, memory_grows=grows)
            assert self.model.model is not None
            return RankRun(
                rank,
                _place(rank, sizes),
                sum(local_part(p).numel() for p in self.model.model.parameters()),
                observer.layers,
                counted.memory,
                sorted(counted.collectives.values(), key=lambda row: -row.sent),
                counts,
                time.perf_counter() - began,
            )

    def _trainer(self, rank: int, strategy: Strategy | str, observer: Callback) -> Trainer:
        plugins: list[Any] = [FakeEnvironment(rank, self.cluster.world, self.cluster.per_node)]
        scaled = self.precision == "16-mixed"
        return Trainer(
            accelerator="cpu",
            devices=self.cluster.per_node,
            num_nodes=self.cluster.nodes,
            strategy=strategy,
            precision=None if scaled else self.precision,  # type: ignore[arg-type]
            plugins=[*plugins, loss_scaling("cpu")] if scaled else plugins,
            callbacks=[*copy.deepcopy(self.callbacks), observer],
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            use_distributed_sampler=False,
            **self.trainer,
        )


class _Observer(Callback):
    """Removes the data from tensors once the processes are connected, and counts each step. A step is one epoch."""

    def __init__(self, micro_batches: list[int], *, for_accelerator: bool) -> None:
        self.micro_batches, self.for_accelerator = micro_batches, for_accelerator
        self.stack = ExitStack()
        self.memory = LiveMemory()
        self.steps: list[Counted] = []
        self.layers: list[int] = []
        self._traffic: Traffic | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        gc.collect()
        self.stack.enter_context(without_garbage_collection())
        self.stack.enter_context(without_data())
        self.stack.enter_context(self.memory)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As after an earlier step: the optimizer has its state, and the old gradients are still there."""
        optimizer = trainer.optimizers[0]
        assert isinstance(pl_module, LanguageModel) and pl_module.model is not None
        self.layers = [int(name) for name, _ in pl_module.model.blocks.named_children()]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for group in optimizer.param_groups:
            if self.for_accelerator and group.get("ns_dtype") == "auto":
                group["ns_dtype"] = "bfloat16"
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        self.memory.name(pl_module.parameters(), "weights")
        self.memory.name(pl_module.buffers(), "buffers")
        self.memory.name(_gradients(parameters), "gradients")
        state = (value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor))
        self.memory.name(state, "optimizer state")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EMA):
                self.memory.name(callback.by_name(pl_module).values(), "weight average")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = self.micro_batches[len(self.steps)]
        self.memory.restart()
        strategy, meshes = trainer.strategy, []
        if isinstance(strategy, MeshStrategy):
            meshes = [mesh for mesh in (strategy.device_mesh, strategy.data_mesh) if mesh is not None]
        self._traffic = Traffic(*meshes)
        self._traffic.__enter__()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._traffic is not None
        self._traffic.__exit__(None, None, None)
        self.memory.name(_gradients(pl_module.parameters()), "gradients")
        self.steps.append(Counted(self.memory.at_peak(), {row[:3]: row for row in self._traffic.rows()}))
        trainer.should_stop = len(self.steps) == len(self.micro_batches)


class _NoData(LightningDataModule):
    """Micro-batches of zeros, as many in each epoch as a step has."""

    def __init__(self, batch: Batch, observer: _Observer) -> None:
        super().__init__()
        self.batch, self.observer = batch, observer
        self.every_target_counts, self.source_names = batch.every_target_counts, list(batch.sources)
        self.vocab_size, self.block_size, self.knows_documents = batch.vocab_size, batch.length, batch.has_documents

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(_Zeros(self.batch, lambda: self.observer.micro_batches[len(self.observer.steps)]), batch_size=None)


class _Zeros(IterableDataset[dict[str, Tensor]]):
    def __init__(self, batch: Batch, count: Callable[[], int]) -> None:
        self.batch, self.count = batch, count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        names = ["input_ids", "targets", *(["documents"] if self.batch.has_documents else [])]
        for _ in range(self.count()):
            made = {name: torch.zeros(self.batch.sequences, self.batch.length, dtype=torch.int64) for name in names}
            if self.batch.sources:
                made["sources"] = torch.zeros(self.batch.sequences, dtype=torch.int64)
            yield made


def short_steps(layout: PipelineLayout, count: int) -> list[int]:
    """Numbers of micro-batches to run for a step of `count`: a short step and a longer one, or `count` alone.

    Without a pipeline the first and the last micro-batch may differ, and those between them are equal. In a pipeline, the short
    step has so many that every rank holds as many activations at once as in a long step.
    """
    ranks = layout.ranks
    first, period = 2, 1
    if ranks > 1 and layout.schedule == "1f1b":
        first = ranks
    elif ranks > 1 and layout.schedule != "gpipe":
        first, period = 2 * ranks, ranks if layout.schedule == "interleaved1f1b" else 1
    if count <= first + period or (count - first) % period:
        return [count]
    return [first, first + period]


def _gradients(parameters: Any) -> Iterator[Tensor]:
    return (p.grad for p in parameters if p.grad is not None)


def _place(rank: int, sizes: MeshSizes) -> MeshSizes:
    """The coordinates of a rank: the last dimension varies fastest."""
    coordinates = []
    for size in reversed(sizes):
        coordinates.append(rank % size)
        rank //= size
    return MeshSizes(*reversed(coordinates))


def _quiet() -> None:
    """What Lightning and torch say about this machine does not concern the cluster."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "torch.distributed.tensor"):
        logging.getLogger(name).setLevel(logging.ERROR)

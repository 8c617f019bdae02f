"""One rank of a cluster whose other ranks do not exist, in one process and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend


class FakeEnvironment(ClusterEnvironment):
    """Tells Lightning that this process is `rank` of machines with `per_node` processes each."""

    creates_processes_externally = True
    main_address, main_port = "nowhere", 0

    def __init__(self, rank: int, world_size: int, per_node: int) -> None:
        super().__init__()
        self._rank, self._world_size, self._per_node = rank, world_size, per_node

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        assert size == self._world_size

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self._rank

    def local_rank(self) -> int:
        return self._rank % self._per_node

    def node_rank(self) -> int:
        return self._rank // self._per_node


@contextmanager
def fake_cluster(rank: int, world_size: int) -> Iterator[None]:
    """Inside, every collective of `rank` returns at once, and leaves its outputs as they are.

    One process can be one rank only: torch caches what it derives from a mesh, and two ranks' meshes are equal.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _stages_agree("_warmup_forward_vote"), _stages_agree("_warmup_backward_result"):
            yield
    finally:
        dist.destroy_process_group()


def _stages_agree(question: str) -> Any:
    """Inside, stages of a pipeline do not ask each other whether all know the shapes of what they exchange: they do."""
    return mock.patch.object(PipelineStage, question, lambda *_, **__: torch.ones(1, dtype=torch.int32))

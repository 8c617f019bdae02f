"""Tensors that move between the ranks of a pipeline outside torch's schedules: in validation, and for tied weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lit_llm.distributed.pipeline_layers import PipelineLayout

_SENDS_IN_FLIGHT = 2
"""The most batches by which a rank may be ahead of the next rank."""


class Transfer:
    """Sends tensors to, and receives tensors from, the other ranks of one pipeline.

    Args:
        group: the ranks of the pipeline.
        rank: this rank's number within the group.
    """

    def __init__(self, layout: PipelineLayout, group: dist.ProcessGroup, rank: int) -> None:
        self.layout, self.group, self.rank = layout, group, rank
        self.stages = layout.stages_of(rank)
        self.first_rank, self.last_rank = layout.rank_of(0), layout.rank_of(layout.stages - 1)
        self._sends: list[tuple[dist.Work, Tensor]] = []  # tensors stay alive until they are sent

    def send(self, stage: int, x: Tensor) -> None:
        """Start to send a stage's output to the next stage's rank; wait first if two sends are in flight. If that is this rank,
        do nothing."""
        target = self.layout.rank_of(stage + 1)
        if target == self.rank:
            return
        while len(self._sends) >= _SENDS_IN_FLIGHT:
            work, _ = self._sends.pop(0)
            work.wait()
        x = x.contiguous()
        sending = dist.isend(x, group=self.group, group_dst=target)
        assert sending is not None
        self._sends.append((sending, x))

    def receive(
        self, stage: int, own: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the input of stage `stage`: `own` if this rank also has the stage before it, else the tensor received."""
        source = self.layout.rank_of(stage - 1)
        if source == self.rank:
            assert own is not None
            return own
        x = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(x, group=self.group, group_src=source)
        return x

    def exchange(self, own: Tensor, other_rank: int) -> Tensor:
        """Send `own` to rank `other_rank` of the pipeline, and return the tensor of the same shape that `other_rank` sends."""
        other = torch.empty_like(own)
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own.contiguous(), group=self.group, group_peer=other_rank),
                dist.P2POp(dist.irecv, other, group=self.group, group_peer=other_rank),
            ]
        )
        for each in work:
            each.wait()
        return other

    def broadcast_from_last(self, x: Tensor) -> Tensor:
        """Send `x` from the rank with the last stage to all ranks of the pipeline. Others pass an `x` that is overwritten.

        Returns the sent tensor on every rank."""
        x = x.contiguous()
        dist.broadcast(x, group=self.group, group_src=self.last_rank)
        return x

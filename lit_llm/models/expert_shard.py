"""Expert parallelism: each rank has a part of a layer's experts, and ranks send tokens' rows to the ranks of their experts.

Letters: n ranks, E experts of the layer, M rows of this rank's tokens, R rows that its experts compute, d ``n_embd``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lit_llm.core._torch import exchange_rows, send_rows


class ExpertShard(NamedTuple):
    """Record of how n ranks split experts: each has E / n consecutive experts of every layer, rank 0 the first, and so on."""

    group: str
    """Name of the ranks' process group."""
    ranks: int
    gradient_scale: float
    """Factor of the experts' gradients: tensor_parallel / ranks. FSDP2 averages an expert's gradient over the ranks that hold
    the expert, and other gradients over shard · context ranks. The factor turns the first mean into the second. A factor that
    is a power of two causes no rounding."""


class Dispatch:
    """Sends the rows of one layer and micro-batch to the ranks that have their experts, and the experts' outputs back.

    An expert gets the rows of rank 0, then the rows of rank 1, and so on, each rank's rows in the order of the tokens. The host
    must know how many rows each rank gets, so the host waits for a GPU once per layer and micro-batch. A recomputation of
    activations does not wait again.

    Args:
        ends: (E,) int32: where the rows of each expert end among this rank's M rows, which are sorted by expert.
        rows: M.

    Attributes:
        ends: (E / n,) int32: where the rows of each expert of this rank end among the R rows that this rank's experts get.
    """

    def __init__(self, shard: ExpertShard, ends: Tensor, rows: int) -> None:
        self.shard = shard
        self.ends, self.order, self.back = ends, None, None
        self.sent = self.received = [rows]
        if shard.ranks == 1:
            return
        counts = ends.diff(prepend=ends.new_zeros(1)).unflatten(0, (shard.ranks, -1))  # (n, E / n): rows for the ranks' experts
        coming = exchange_rows(counts, shard.ranks, shard.group)  # (n, E / n): rows of the ranks for this rank's experts
        if type(ends) is Tensor and not ends.is_meta:
            self.sent, self.received = row_numbers(counts, coming).tolist()
        else:  # a plan's tensors have no values: the load is taken to be equal
            equal = rows // shard.ranks
            self.sent = self.received = [*[equal] * (shard.ranks - 1), rows - equal * (shard.ranks - 1)]
        numbers = torch.arange(coming.size(1), device=ends.device).repeat(shard.ranks)
        experts = numbers.repeat_interleave(coming.flatten(), output_size=sum(self.received))  # (R,)
        self.order = experts.argsort(stable=True)
        self.back = self.order.argsort()
        self.ends = coming.sum(dim=0).cumsum(dim=0, dtype=torch.int32)

    def to_experts(self, x: Tensor) -> Tensor:
        """Send rows (M, d) to the experts' ranks. Returns the rows (R, d) for this rank's experts, sorted by expert."""
        # Autocast rounds the experts' inputs anyway, so they travel in its dtype. The gradient keeps its dtype.
        autocast = torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32
        wire = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        y = _Sent.apply(x, self.shard, self.sent, self.received, 1 / self.shard.gradient_scale, wire)
        return y if self.order is None else Reordered.apply(y, self.order, self.back)

    def to_tokens(self, y: Tensor) -> Tensor:
        """Send experts' outputs (R, d) back. Returns (M, d), in the order of the rows that `to_experts` took."""
        if self.order is not None:
            y = Reordered.apply(y, self.back, self.order)
        return _Sent.apply(y, self.shard, self.received, self.sent, self.shard.gradient_scale, y.dtype)


class _Sent(Function):
    """Sends rows to other ranks. Backward sends the rows' gradients back, multiplied by `scale`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shard: ExpertShard, sent: list[int], received: list[int], scale: float, wire: torch.dtype
    ) -> Tensor:
        ctx.options = shard, sent, received, scale
        if shard.ranks == 1:
            return x.view_as(x)
        return send_rows(x.to(wire), sent, received, shard.group).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        shard, sent, received, scale = ctx.options
        if scale != 1.0:
            gradient = gradient * scale
        if shard.ranks > 1:
            gradient = send_rows(gradient, received, sent, shard.group)
        return gradient, None, None, None, None, None


class Reordered(Function):
    """Permutes rows by `order`: (M, d) → (M, d). Backward copies the gradient's rows by the inverse order, `back`; no sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


@torch.library.custom_op("lit_llm::row_numbers", mutates_args=())
def row_numbers(counts: Tensor, coming: Tensor) -> Tensor:
    """Return (2, n) on the host: number of rows that this rank sends to each rank, number of rows that it gets from each rank.

    `counts` (sent) and `coming` (received), (n, E / n) each, have these numbers per expert of the receiving rank.

    This is a custom operator, so that a recomputation reuses its saved result (`activation_checkpointing.recompute_block`).
    """
    return torch.stack((counts.sum(dim=1), coming.sum(dim=1))).cpu()


@row_numbers.register_fake
def _(counts: Tensor, coming: Tensor) -> Tensor:
    return counts.new_empty((2, counts.size(0)), dtype=torch.int64, device="cpu")

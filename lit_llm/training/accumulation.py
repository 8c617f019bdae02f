"""Adds loss sums over the micro-batches of an optimizer step or an evaluation, on the device, also by source of a mixture.

A counted target is a target other than -100. Averaging the means of batches or ranks is wrong if their numbers of counted
targets differ. So sums are added, and divided once, at the end. Checkpoints store no sums: between two steps all are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lit_llm.models.loss import LossSums


def mean_of(sums: LossSums) -> Tensor:
    """The loss to minimise, a scalar tensor: `sums.loss` / `sums.count`. A count of 0 (no counted target) is taken as 1."""
    return sums.loss / sums.count.clamp(min=1)


def wide(device: torch.device) -> torch.dtype:
    """The dtype of loss sums: float64, as float32 is too coarse for a billion nats; float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class Accumulation:
    """Makes the loss and the gradient of an optimizer step means over the counted targets of the global batch.

    With ignored targets, the number of counted targets of a batch is known only after the last micro-batch. So the mean of each
    micro-batch is weighted by count / `block_size`, and `end` returns the factor that makes the summed gradient exact. Ranks
    that share sequences have a part of each sequence; the strategy averages gradients over these ranks, too.

    Args:
        losses: the layout of the sums, with a row for each logged mean.
        block_size: the largest number of targets in a sequence.
        equal: whether every micro-batch of every rank has the same number of counted targets.
        loss_ranks: the number of ranks that compute a loss, whose sums `end` adds.
    """

    def __init__(self, losses: LossMeans, *, block_size: int, equal: bool, loss_ranks: int) -> None:
        self.losses = losses
        self._sums: Tensor | None = None  # (k, 2), of the step so far, see `LossMeans.of`
        self.block_size, self.equal, self.loss_ranks = block_size, equal, loss_ranks
        self.latest_count: Tensor | int = 0
        self.routers: Tensor | None = None
        """Sums of the routers over the latest step and all ranks, as `RouterSums.packed` returns. None: no experts."""
        self._routers: Tensor | None = None  # this rank's sums of the routers in the step so far

    def add(self, batch: dict[str, Tensor], sums: LossSums) -> None:
        added = self.losses.of(batch, sums)
        self._sums = added if self._sums is None else self._sums + added
        self.latest_count = sums.count
        if sums.router is not None:
            packed = sums.router.packed()
            self._routers = packed if self._routers is None else self._routers + packed

    def weight(self, count: Tensor | int) -> Tensor | float:
        """The factor by which to multiply a micro-batch's mean loss before its backward pass. `count`: its counted targets.

        A count of 0 is taken as 1, as in `mean_of`: with `predict_ahead`, a micro-batch without counted next tokens can have a
        loss of tokens further ahead.
        """
        if self.equal:
            return 1.0
        return (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)) / self.block_size

    def first_gradient_scale(self, accumulate: int) -> Tensor | float:
        """The factor that turns the gradient after a step's first micro-batch into the gradient of the micro-batch's mean loss.

        Infinite if no target of the micro-batch is counted. `accumulate`: the number of micro-batches of a step.
        """
        count = torch.zeros(()) if self._sums is None else self._sums[0, 1]
        return accumulate if self.equal else accumulate * self.block_size / count

    def end(self, strategy: Strategy, accumulate: int) -> tuple[Tensor, Tensor | None]:
        """End an optimizer step: add all ranks' sums, reset this rank's, and set `routers` to the routers' sums. A collective.

        Returns ((k, 2) sums for `LossMeans.row`, the factor by which gradients must be multiplied; None: 1).

        Args:
            accumulate: the number of micro-batches of a whole step, by which Lightning has divided the gradients.
        """
        # In a pipeline, ranks that do not compute the loss have added nothing.
        own = self.losses.zeros(strategy.root_device) if self._sums is None else self._sums
        parts, of_routers = [own.flatten()], self._routers
        self._sums = self._routers = None
        if of_routers is not None:
            parts.append(of_routers.flatten())
        sums = strategy.reduce(torch.cat(parts), reduce_op="sum")
        assert isinstance(sums, Tensor)
        if of_routers is not None:
            sums, self.routers = sums[: -of_routers.numel()], sums[-of_routers.numel() :].view_as(of_routers)
        sums = sums.view_as(own)
        if self.equal:
            return sums, None
        targets = self.block_size * accumulate * self.loss_ranks  # the strategy has divided by the number of ranks
        return sums, (targets / sums[0, 1].clamp(min=1)).float()  # a batch without any target has zero gradients, not NaN


class LossMeans:
    """Makes loss sums, (k, 2), and means from them: the loss, the loss of each source of a mixture, an objective's own means.

    The sums are bitwise reproducible: the sum of a source is a masked sum over rows, without atomic additions. A NaN loss of
    one source does not affect other sources.

    Args:
        sources: names of the sources; a batch's `sources` has their indices.
        further: names of the objective's own means, the rows of `LossSums.means`.
    """

    def __init__(self, sources: Sequence[str] = (), further: Sequence[str] = ()) -> None:
        self.names = ["loss", *(f"{name}/loss" for name in sources), *further]
        self._further_from = 1 + len(sources)

    def zeros(self, device: torch.device) -> Tensor:
        """Zero sums, (k, 2), float64 (float32 on MPS): for each of the k logged means its sum and its divisor.

        Row 0 is for the loss: nats, and the number of counted targets.
        """
        return torch.zeros(len(self.names), 2, dtype=wide(device), device=device)

    def of(self, batch: Mapping[str, Tensor], sums: LossSums) -> Tensor:
        """The sums of a batch, (k, 2), from its `LossSums`. A batch with "sources", (B,), needs `row_nll` and `row_count`."""
        added = self.zeros(sums.nll.device)
        added[0, 0], added[0, 1] = sums.nll.detach(), sums.count
        if "sources" in batch:
            assert sums.row_nll is not None and sums.row_count is not None, "call the loss with by_row=True"
            rows = torch.stack((sums.row_nll.to(added.dtype), sums.row_count.to(added.dtype)), dim=1)  # (B, 2)
            is_of = batch["sources"] == torch.arange(self._further_from - 1, device=added.device)[:, None]  # (S, B)
            added[1 : self._further_from] = torch.where(is_of[..., None], rows, 0).sum(dim=1)
        if sums.means is not None:
            added[self._further_from :] = sums.means
        return added

    def row(self, prefix: str, sums: Tensor) -> dict[str, float]:
        """Logged name, such as "train/web/loss" → mean, from (k, 2) `sums`. A mean whose divisor is 0 is left out."""
        return {f"{prefix}/{name}": a / b for name, (a, b) in zip(self.names, sums.tolist(), strict=True) if b}

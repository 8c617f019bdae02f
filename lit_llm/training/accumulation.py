"""Sums over the micro-batches of an optimizer step, or of an evaluation, on the device: of losses, also by source of a mixture.

Averaging means of batches or of ranks would be wrong where these have different numbers of tokens. So there is one division at
the end. Nothing here is saved: checkpoints are made between optimizer steps, when all sums are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lit_llm.models.loss import LossSums


def mean_of(sums: LossSums) -> Tensor:
    """The mean loss over the counted targets; 0 without any."""
    return sums.loss / sums.count.clamp(min=1)


def wide(device: torch.device) -> torch.dtype:
    """Of sums: a float32 sum of a billion nats is too coarse to compare losses, but MPS has no other."""
    return torch.float32 if device.type == "mps" else torch.float64


class Accumulation:
    """Makes the loss and the gradient of an optimizer step means over the counted targets of the global batch.

    With ignored targets, that number is only known after the last micro-batch. So each mean is weighted by its count over a
    constant, the same on all ranks, and `end` gives the factor from there to the exact mean. Ranks that share each sequence
    have parts of it, and the strategy averages the gradients over these ranks, too.

    Args:
        losses: the means to log.
        block_size: the most targets of a row.
        equal: every micro-batch has equally many counted targets, on all ranks.
        loss_ranks: the number of ranks whose loss sums are added.
    """

    def __init__(self, losses: LossMeans, *, block_size: int = 1, equal: bool = True, loss_ranks: int = 1) -> None:
        self.losses = losses
        self._sums: Tensor | None = None  # of `losses`
        self.block_size, self.equal, self.loss_ranks = block_size, equal, loss_ranks
        self.is_last = False  # whether the backward pass of the step's last micro-batch runs
        self.latest_count: Tensor | int = 0
        self.routers: Tensor | None = None
        """(L, E + 2) float64, of the latest step, over all ranks: counts of experts, the sums of entropies and of z."""
        self._routers: Tensor | None = None  # (L, E + 2): counts, entropy and z of each block with experts

    def add(self, batch: dict[str, Tensor], sums: LossSums) -> None:
        added = self.losses.of(batch, sums)
        self._sums = added if self._sums is None else self._sums + added
        self.latest_count = sums.count
        if sums.router is not None:
            router = sums.router
            of_routers = torch.cat((router.counts, torch.stack((router.entropy, router.z), dim=1).double()), dim=1)
            self._routers = of_routers if self._routers is None else self._routers + of_routers

    def weight(self, count: Tensor | int) -> Tensor | float:
        """The factor for the mean of a micro-batch with this number of counted targets, before its backward pass.

        `mean_of` divides by 1 if no target counts: tokens further ahead may count all the same, of a part of a sequence.
        """
        if self.equal:
            return 1.0
        return (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)) / self.block_size

    def first_gradient_scale(self, accumulate: int) -> Tensor | float:
        """After the first micro-batch of a step: what makes its gradient that of the mean over its targets; inf without any."""
        count = torch.zeros(()) if self._sums is None else self._sums[0, 1]
        return accumulate if self.equal else accumulate * self.block_size / count

    def end(self, strategy: Strategy, accumulate: int) -> tuple[Tensor, Tensor | None]:
        """(sums over all ranks, what the gradients are multiplied by; None: nothing). Starts over.

        The sums are what `LossMeans.row` takes. Those of routers become `routers`.

        Args:
            accumulate: micro-batches of a whole step, by which Lightning has divided the gradients.
        """
        # Of a pipeline, ranks without the loss have added nothing.
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
    """The means that are logged: the loss, that of each source of a mixture, and those of an objective, from sums.

    The sums are the same bits in every run: those of a source are masked sums over rows, without atomic additions. A source
    whose loss is NaN leaves the others as they are.

    Args:
        sources: names of the sources, in the order of their numbers in a batch's `sources`.
        further: names of the rows of `LossSums.means`.
    """

    def __init__(self, sources: Sequence[str] = (), further: Sequence[str] = ()) -> None:
        self.names = ["loss", *(f"{name}/loss" for name in sources), *further]
        self._further_from = 1 + len(sources)

    def zeros(self, device: torch.device) -> Tensor:
        """The sums of no batch, (k, 2) `wide`: for each mean a sum, and what it is divided by. First nats, counted targets."""
        return torch.zeros(len(self.names), 2, dtype=wide(device), device=device)

    def of(self, batch: Mapping[str, Tensor], sums: LossSums) -> Tensor:
        """The sums of a batch, (k, 2). With "sources", (B,) int64, `sums` has `row_nll` and `row_count`."""
        found = self.zeros(sums.nll.device)
        found[0, 0], found[0, 1] = sums.nll.detach(), sums.count
        if "sources" in batch:
            assert sums.row_nll is not None and sums.row_count is not None, "call the loss with by_row=True"
            rows = torch.stack((sums.row_nll.to(found.dtype), sums.row_count.to(found.dtype)), dim=1)  # (B, 2)
            is_of = batch["sources"] == torch.arange(self._further_from - 1, device=found.device)[:, None]  # (S, B)
            found[1 : self._further_from] = torch.where(is_of[..., None], rows, 0).sum(dim=1)
        if sums.means is not None:
            found[self._further_from :] = sums.means
        return found

    def row(self, prefix: str, sums: Tensor) -> dict[str, float]:
        """Values to log, such as "train/web/loss", from sums over batches and ranks. A mean of nothing is left out."""
        return {f"{prefix}/{name}": a / b for name, (a, b) in zip(self.names, sums.tolist(), strict=True) if b}

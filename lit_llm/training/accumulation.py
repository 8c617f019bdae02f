"""Sums over the micro-batches of an optimizer step, on the device: of their losses, also by source of a mixture.

Nothing here is saved: checkpoints are made between optimizer steps, when all sums are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        sources: names of the sources of a mixture.
        means: names of further means, those of `LossSums.means`.
        block_size: the most targets of a row.
        equal: every micro-batch has equally many counted targets, on all ranks.
        loss_ranks: the number of ranks whose loss sums are added.
    """

    def __init__(
        self,
        sources: Sequence[str] = (),
        *,
        means: Sequence[str] = (),
        block_size: int = 1,
        equal: bool = True,
        loss_ranks: int = 1,
    ) -> None:
        self.means = Means(means)
        self.block_size, self.equal, self.loss_ranks = block_size, equal, loss_ranks
        self.sources = SourceLosses(sources)
        self.micro_batches = 0  # of the step so far
        self.is_last = False  # whether the backward pass of the step's last micro-batch runs
        self.latest_count: Tensor | int = 0
        self.routers: Tensor | None = None
        """(L, E + 2) float64, of the latest step, over all ranks: counts of experts, the sums of entropies and of z."""
        self.step_means = torch.zeros(0)
        """(2 k,) `wide`, of the latest step, over all ranks: what `Means.row` takes."""
        self._nll: Tensor | float = 0.0
        self._count: Tensor | int = 0
        self._routers: Tensor | None = None  # (L, E + 2): counts, entropy and z of each block with experts

    def add(self, batch: dict[str, Tensor], sums: LossSums) -> None:
        if "sources" in batch:
            self.sources.add(batch["sources"], sums)
        self.latest_count = sums.count
        self._nll = self._nll + sums.nll
        self._count = self._count + sums.count
        self.means.add(sums)
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
        return accumulate if self.equal else accumulate * self.block_size / torch.as_tensor(self._count)

    def end(self, strategy: Strategy, accumulate: int) -> tuple[Tensor, Tensor | None]:
        """(sums over all ranks, what the gradients are multiplied by; None: nothing). Starts over.

        The sums, (2 + 2 S,) `wide`: nats, counted targets, and those of each source. Others become `step_means` and `routers`.

        Args:
            accumulate: micro-batches of a whole step, by which Lightning has divided the gradients.
        """
        # Of a pipeline, ranks without the loss have plain zeros. Copying those to a GPU would wait for it.
        zero = torch.zeros((), dtype=wide(strategy.root_device), device=strategy.root_device)
        own = torch.stack([value + zero for value in (self._nll, self._count)])
        parts = [own, self.sources.take(own.device).to(own.dtype), self.means.take(own.device)]
        size = sum(map(len, parts[:2]))
        of_routers, self._routers = self._routers, None
        if of_routers is not None:
            parts.append(of_routers.flatten())
        sums = strategy.reduce(torch.cat(parts), reduce_op="sum")
        assert isinstance(sums, Tensor)
        if of_routers is not None:
            sums, self.routers = sums[: -of_routers.numel()], sums[-of_routers.numel() :].view_as(of_routers)
        sums, self.step_means = sums[:size], sums[size:]
        made, self.micro_batches, self._nll, self._count = self.micro_batches, 0, 0.0, 0
        if not self.equal:
            targets = self.block_size * accumulate * self.loss_ranks  # the strategy has divided by the number of ranks
            return sums, (targets / sums[1].clamp(min=1)).float()  # a batch without any target has zero gradients, not NaN
        return sums, None if made == accumulate else torch.tensor(accumulate / made)  # the epoch ends within a step


class Means:
    """Further means beside the loss, such as those of an objective: their sums since the last `take`.

    Args:
        names: of the rows of `LossSums.means`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._sums: Tensor | None = None  # (k, 2): a sum, and what it is divided by

    def add(self, sums: LossSums) -> None:
        if sums.means is not None:
            added = sums.means.to(wide(sums.means.device))
            self._sums = added if self._sums is None else self._sums + added

    def take(self, device: torch.device) -> Tensor:
        """The sums, (2 k,); zeros on `device` without any. Starts over. Sum it over ranks before `row`."""
        sums, self._sums = self._sums, None
        return torch.zeros(2 * len(self.names), dtype=wide(device), device=device) if sums is None else sums.flatten()

    def row(self, prefix: str, sums: Sequence[float]) -> dict[str, float]:
        """Values to log, such as "train/loss_ahead", from what `take` gave. A mean of nothing is left out."""
        return {f"{prefix}/{name}": a / b for name, a, b in zip(self.names, sums[::2], sums[1::2], strict=True) if b}


class SourceLosses:
    """Sums of NLL and counted targets by source since the last `take`.

    The sums are the same bits in every run: each is a masked sum over rows, without atomic additions. A source whose loss is
    NaN leaves the others as they are.

    Args:
        names: of the sources, in the order of their numbers in a batch's `sources`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._sums: Tensor | None = None  # (2, S): NLL in nats, counted targets

    def add(self, sources: Tensor, sums: LossSums) -> None:
        """Add a batch.

        Args:
            sources: (B,) int64, the number of each row's source.
            sums: with `row_nll` and `row_count`.
        """
        assert sums.row_nll is not None and sums.row_count is not None, "call the loss with by_row=True"
        dtype = wide(sources.device)
        rows = torch.stack((sums.row_nll.to(dtype), sums.row_count.to(dtype)))  # (2, B)
        numbers = torch.arange(len(self.names), device=sources.device)
        added = torch.where(sources == numbers[:, None], rows[:, None], 0).sum(dim=-1)  # (2, S)
        self._sums = added if self._sums is None else self._sums + added

    def take(self, device: torch.device) -> Tensor:
        """The sums, (2 S,): NLL of all sources, then their counts; zeros on `device` without a batch. Starts over.

        Sum it over ranks before `losses`.
        """
        sums, self._sums = self._sums, None
        return torch.zeros(2 * len(self.names), dtype=wide(device), device=device) if sums is None else sums.flatten()

    def row(self, prefix: str, sums: Sequence[float]) -> dict[str, float]:
        """Rows to log, such as "train/web/loss", from what `take` gave. A source without counted targets is left out."""
        nll, counts = sums[: len(self.names)], sums[len(self.names) :]
        return {f"{prefix}/{name}/loss": n / c for name, n, c in zip(self.names, nll, counts, strict=True) if c}
